#include "bindings/python_hook.h"
#include "bindings/register_apis.h"
#include "reducer/reducer.h"

namespace py = pybind11;

namespace commhooks {
namespace {

std::shared_ptr<Reducer> make_reducer(
    std::vector<at::Tensor> parameters,
    c10::intrusive_ptr<c10d::ProcessGroup> process_group,
    std::vector<std::string> names,
    std::vector<int64_t> groups,
    int64_t first_bucket_bytes,
    int64_t bucket_bytes,
    bool find_unused_parameters,
    bool static_graph,
    bool gradient_as_bucket_view,
    bool stable_buckets) {
  ReducerOptions options;
  options.names = std::move(names);
  options.groups = std::move(groups);
  options.caps = {first_bucket_bytes, bucket_bytes};
  options.find_unused_parameters = find_unused_parameters;
  options.static_graph = static_graph;
  options.gradient_as_bucket_view = gradient_as_bucket_view;
  options.stable_buckets = stable_buckets;
  return Reducer::create(std::move(parameters), std::move(options), std::move(process_group));
}

void set_hook(Reducer& reducer, const py::object& hook) {
  std::shared_ptr<Hook> native;
  if (py::isinstance<Hook>(hook)) {
    native = hook.cast<std::shared_ptr<Hook>>();
  } else if (PyCallable_Check(hook.ptr())) {
    native = std::make_shared<PythonHook>(hook);
  } else {
    throw py::type_error(
        c10::str(
            "Expected a native hook or a callable that takes a GradBucket, found ",
            py::repr(hook).cast<std::string>(), "."));
  }
  py::gil_scoped_release no_gil;
  reducer.set_hook(std::move(native));
}

py::list bucket_stats(const Reducer& reducer) {
  std::vector<Reducer::BucketInfo> infos;
  {
    py::gil_scoped_release no_gil;
    infos = reducer.buckets();
  }
  py::list rows;
  for (size_t index = 0; index < infos.size(); ++index) {
    const auto& info = infos[index];
    py::dict row;
    row["index"] = index;
    row["names"] = info.layout->names;
    row["key"] = info.layout->key;
    row["gradient_bytes"] = info.bytes;
    row["packed_bytes"] = info.stats.packed_bytes;
    row["steps"] = info.stats.steps;
    row["hook_seconds"] = info.stats.hook_seconds;
    row["exposed_seconds"] = info.stats.exposed_seconds;
    rows.append(std::move(row));
  }
  return rows;
}

}  // namespace

void register_reducer(py::module_& module) {
  using release_gil = py::call_guard<py::gil_scoped_release>;

  py::class_<Reducer, std::shared_ptr<Reducer>>(module, "Reducer", R"(
Buckets the gradients of `parameters`, hands each bucket to the hook as soon as it is complete, in
bucket order, and writes the averages back into `.grad`. See Note [How a gradient travels].)")
      .def(
          py::init(&make_reducer), py::arg("parameters"), py::arg("process_group"), py::kw_only(),
          py::arg("names"), py::arg("groups"), py::arg("first_bucket_bytes"),
          py::arg("bucket_bytes"), py::arg("find_unused_parameters") = false,
          py::arg("static_graph") = false, py::arg("gradient_as_bucket_view") = false,
          py::arg("stable_buckets") = false)
      .def(
          "prepare_for_backward", &Reducer::prepare_for_backward, py::arg("outputs"), release_gil(),
          R"(
Announce that the next backward synchronises. `outputs`: the tensors that forward returned where
`needs_outputs`, else empty. Raises RuntimeError, naming the parameters, if the previous backward left
some without a gradient; the reducer is usable afterwards.)")
      .def_property_readonly(
          "needs_outputs", &Reducer::needs_outputs,
          "Whether `prepare_for_backward` looks at the outputs of forward.")
      .def("rebuild_buckets", &Reducer::rebuild_buckets, release_gil(), R"(
Once, after the first synchronised step: cut buckets anew in the order in which rank 0 saw gradients
arrive. Collective; a no-op, on all ranks alike, when there is nothing to do. Returns whether it did.)")
      .def("set_hook", &set_hook, py::arg("hook"), R"(
Use `hook` from the next step on: a native one, or a callable that takes a GradBucket and returns a
torch.futures.Future of one tensor like `bucket.buffer()`, the average. The callable runs with the GIL
on the thread that runs backward, in bucket order. Raises RuntimeError while a backward is under way.)")
      .def("abandon", &Reducer::abandon, release_gil(), R"(
End the current step, if there is one: wait for the buckets that are with the hook and forget them.)")
      .def("bucket_stats", &bucket_stats, R"(
One dict per bucket: index, names, key, gradient_bytes, and since the last reset: steps, packed_bytes
(handed to the hook), hook_seconds (from handing over to completion), exposed_seconds (time that the
thread running backward spent in the hook or waiting for it).)")
      .def("reset_stats", &Reducer::reset_stats, release_gil(), "Start `bucket_stats` from zero.")
      .def_property("steps", &Reducer::steps, &Reducer::set_steps, R"(
Synchronised backward passes so far, the `step` of the next GradBucket. Set it when training resumes.)");
}

}  // namespace commhooks
