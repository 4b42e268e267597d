#include "reducer/reducer.h"
#include "bindings/reducer/python_hook.h"
#include "bindings/reducer/register.h"
#include "host/host_group.h"
#include "host/sums.h"
#include "reducer/native_hooks.h"

#include <pybind11/chrono.h>
#include <torch/csrc/jit/python/pybind_utils.h>

namespace py = pybind11;
using namespace py::literals;

namespace commhooks {
namespace {

template <typename Function>
auto without_gil(const Function& function) {
  const py::gil_scoped_release no_gil;
  return function();
}

// Makes a method of the pipeline one of the reducer.
template <typename Pipeline, typename Result, typename... Arguments>
auto in_pipeline(Result (Pipeline::*method)(Arguments...)) {
  return [method](Reducer& reducer, Arguments... arguments) {
    return (reducer.pipeline().*method)(std::move(arguments)...);
  };
}
template <typename Result>
auto in_pipeline(Result (BucketPipeline::*method)() const) {
  return [method](Reducer& reducer) { return (reducer.pipeline().*method)(); };
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
  without_gil([&] { reducer.pipeline().set_hook(std::move(native)); });
}

void set_observer(Reducer& reducer, const py::object& observer) {
  BucketPipeline::Observer native;
  if (!observer.is_none()) {
    native = python_observer(observer);
  }
  without_gil([&] { reducer.pipeline().set_observer(std::move(native)); });
}

void await_after_backward(
    Reducer& reducer,
    const std::vector<std::shared_ptr<torch::jit::PythonFutureWrapper>>& futures) {
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> awaited;
  for (const auto& future : futures) {
    awaited.push_back(future->fut);
  }
  without_gil([&] { reducer.pipeline().await_after_backward(std::move(awaited)); });
}

void mean_of(const std::vector<at::Tensor>& tensors, const at::Tensor& out) {
  TORCH_CHECK(
      !tensors.empty() && out.is_contiguous() && out.is_cpu(),
      "Expected at least one tensor, and a result that is contiguous and on the CPU.");
  std::vector<const void*> sources;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(
        tensor.is_contiguous() && tensor.is_cpu() && tensor.numel() == out.numel() &&
            tensor.dtype() == out.dtype(),
        "Expected contiguous tensors on the CPU, with the size and dtype of the result.");
    sources.push_back(tensor.const_data_ptr());
  }
  const double scale = 1.0 / static_cast<double>(tensors.size());
  sum(sources, out.data_ptr(), out.numel(), out.scalar_type(), out.scalar_type(), scale);
}

double seconds(Span::Clock::time_point time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

int64_t nanoseconds(Span::Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

py::dict last_times(Reducer& reducer) {
  const StepTimes times = without_gil([&] { return reducer.pipeline().last_times(); });
  return py::dict(
      "backward_start"_a = seconds(times.backward_start),
      "backward_end"_a = seconds(times.backward_end),
      "communication_start"_a = seconds(times.communication_start),
      "communication_end"_a = seconds(times.communication_end));
}

py::dict last_use(const Reducer& reducer) {
  const GradientTracker::Use use = without_gil([&] { return reducer.last_use(); });
  return py::dict(
      "order"_a = use.order, "unused"_a = use.unused, "is_constant"_a = use.is_constant);
}

py::list stop_recording(Reducer& reducer) {
  py::list rows;
  for (const Span& span : without_gil([&] { return reducer.pipeline().recorder().stop(); })) {
    py::dict row(
        "activity"_a = kActivityNames[static_cast<size_t>(span.activity)], "index"_a = span.index,
        "start_ns"_a = nanoseconds(span.start), "end_ns"_a = nanoseconds(span.end));
    if (span.layout) {
      row["key"] = span.layout->key;
      row["names"] = span.layout->names;
      row["hook"] = span.hook;
    }
    rows.append(std::move(row));
  }
  return rows;
}

py::list bucket_stats(Reducer& reducer) {
  py::list rows;
  for (const auto& it : without_gil([&] { return reducer.pipeline().bucket_infos(); })) {
    rows.append(
        py::dict(
            "index"_a = rows.size(), "names"_a = it.layout->names, "key"_a = it.layout->key,
            "indices"_a = it.indices, "gradient_bytes"_a = it.bytes, "group"_a = it.group,
            "is_sparse"_a = it.is_sparse, "ranks"_a = it.ranks,
            "packed_bytes"_a = it.stats.packed_bytes, "steps"_a = it.stats.steps,
            "hook_seconds"_a = it.stats.hook_seconds,
            "exposed_seconds"_a = it.stats.exposed_seconds));
  }
  return rows;
}

}  // namespace

void register_reducer(py::module_& module) {
  using release_gil = py::call_guard<py::gil_scoped_release>;  // Note [Locks and the GIL]
  // For owners of process groups: a Gloo group joins its threads, and they may need the GIL.
  const py::release_gil_before_calling_cpp_dtor drops_without_gil;
  using Pipeline = BucketPipeline;

  py::class_<Hook, std::shared_ptr<Hook>>(
      module, "NativeHook", "A communication hook that runs in C++ without the GIL.");

  py::class_<Transport, TransportPtr>(module, "Transport", R"(
A way for ranks to average that needs the memory of the buckets.)")
      .def_property_readonly("name", &Transport::name);

  py::class_<HostGroup, Transport, std::shared_ptr<HostGroup>>(module, "HostGroup", R"(
Ranks of one host, which average through memory that they share. Raises RuntimeError if the system
lacks what is needed. csrc/host/host_group.h describes the methods.)")
      .def(py::init(&HostGroup::create), release_gil())
      .def_property_readonly("address", &HostGroup::address)
      .def("connect", &HostGroup::connect, py::arg("addresses"), release_gil())
      .def(
          "check_room", &HostGroup::check_room, py::arg("shared"), py::arg("mapped"), release_gil())
      .def_property_readonly("ranks", &HostGroup::ranks)
      .def_static("of", &HostGroup::of, py::arg("tensor"))
      .def("allocate", &HostGroup::allocate, py::arg("numel"), py::arg("dtype"), release_gil())
      .def("offset_of", &HostGroup::offset_of, py::arg("tensor"))
      .def("tensors_at", &HostGroup::tensors_at, py::arg("offsets"), py::arg("own"), release_gil())
      .def_static("mean_of", &mean_of, py::arg("tensors"), py::arg("out"), release_gil(), R"(
Write the mean of flat tensors, of the dtype and size of `out`, to it. Half precision is summed in
fp32.)")
      .def("set_liveness_interval", &HostGroup::set_liveness_interval, py::arg("interval"));

  py::class_<AverageHook, Hook, std::shared_ptr<AverageHook>>(
      module, "AverageHook", drops_without_gil, R"(
Average by one all-reduce on `process_group`, in `wire_dtype` (None: the dtype of the gradients).
Profiles and traces have the `name`.)")
      .def(
          py::init<
              c10::intrusive_ptr<c10d::ProcessGroup>, std::optional<c10::ScalarType>,
              std::string>(),
          py::arg("process_group"), py::arg("wire_dtype") = py::none(),
          py::arg("name") = "average");

  py::class_<NoopHook, Hook, std::shared_ptr<NoopHook>>(
      module, "NoopHook", "Send nothing; every rank keeps its own gradients.")
      .def(py::init<>());

  using Options = ReducerOptions;
  py::class_<Options>(module, "ReducerOptions", "Settings, which csrc/reducer/options.h describes.")
      .def(py::init<>())
      .def_readwrite("names", &Options::names)
      .def_readwrite("keys", &Options::keys)
      .def_readwrite("sparse", &Options::sparse)
      .def_readwrite("key_groups", &Options::key_groups)
      .def_readwrite("late_key", &Options::late_key)
      .def_readwrite("bucket_bytes", &Options::bucket_bytes)
      .def_readwrite("find_unused_parameters", &Options::find_unused_parameters)
      .def_readwrite("static_graph", &Options::static_graph)
      .def_readwrite("gradient_as_bucket_view", &Options::gradient_as_bucket_view)
      .def_readwrite("stable_buckets", &Options::stable_buckets)
      .def_readwrite("skip_unused_buckets", &Options::skip_unused_buckets)
      .def_readwrite("release_buckets", &Options::release_buckets);

  py::class_<Reducer, std::shared_ptr<Reducer>>(module, "Reducer", drops_without_gil, R"(
Buckets the gradients of `parameters`, hands each bucket to the hook as soon as it is complete, in
bucket order, and writes the averages back into `.grad`. csrc/reducer/reducer.h and
csrc/reducer/bucket_pipeline.h describe the methods.)")
      .def(
          py::init(&Reducer::create), py::arg("parameters"), py::arg("options"),
          py::arg("process_group"), py::arg("transport") = nullptr)
      .def(
          "begin_step", &Reducer::begin_step, py::arg("outputs"), py::arg("scale") = 1.0,
          release_gil())
      .def_property_readonly(
          "awaits_backward", py::cpp_function(&Reducer::awaits_backward, release_gil()))
      .def("match_backward", &Reducer::match_backward, py::arg("skipped"), release_gil())
      .def_property_readonly(
          "skipped_buckets",
          py::cpp_function(in_pipeline(&Pipeline::skipped_buckets), release_gil()))
      .def_property_readonly("needs_outputs", &Reducer::needs_outputs)
      .def("rebuild_buckets", &Reducer::rebuild_buckets, release_gil())
      .def_property_readonly(
          "has_rebuilt_buckets", py::cpp_function(&Reducer::has_rebuilt, release_gil()))
      .def("set_hook", &set_hook, py::arg("hook"), R"(
Use `hook` from the next step on: a native hook, or a callable that takes a GradBucket and
returns a torch.futures.Future of the average, one tensor like `bucket.buffer()`. The callable
runs with the GIL on the thread that runs backward, in bucket order. Raises RuntimeError while a
backward is under way.)")
      .def_property_readonly(
          "hook_name", py::cpp_function(in_pipeline(&Pipeline::hook_name), release_gil()))
      .def("set_keys", &Reducer::set_keys, py::arg("keys"), release_gil())
      .def("set_static_graph", &Reducer::set_static_graph, release_gil())
      .def_property_readonly(
          "process_group", py::cpp_function(in_pipeline(&Pipeline::process_group), release_gil()))
      .def(
          "set_process_group", &Reducer::set_process_group, py::arg("process_group"),
          py::arg("transport") = nullptr, release_gil())
      .def_property_readonly(
          "transport", py::cpp_function(in_pipeline(&Pipeline::transport), release_gil()), R"(
The way to average that the buckets are made for; None if hooks use the process group.)")
      .def_property_readonly("is_attached", py::cpp_function(&Reducer::is_attached, release_gil()))
      .def("reattach", &Reducer::reattach, release_gil())
      .def("expect_local_gradients", &Reducer::expect_local_gradients, release_gil())
      .def("remove_autograd_hooks", &Reducer::remove_autograd_hooks, release_gil())
      .def("set_observer", &set_observer, py::arg("observer"), R"(
Call `observer(indices)` on the thread that runs backward, as soon as the gradients of the
parameters with these indices have been averaged and written back. None removes the observer.)")
      .def("await_after_backward", &await_after_backward, py::arg("futures"))
      .def(
          "set_manual_finalization", in_pipeline(&Pipeline::set_manual_finalization),
          py::arg("manual"), release_gil())
      .def("finalize_backward", in_pipeline(&Pipeline::finalize_backward), release_gil())
      .def("check_finalized", &Reducer::check_finalized, release_gil())
      .def("last_times", &last_times, R"(
Return when backward and communication of the last step started and ended, in seconds of a
monotonic clock: backward_start, backward_end, communication_start and communication_end.)")
      .def("last_use", &last_use, R"(
Return the use of parameters in the last step: order (the indices of those with a gradient, in the
order of arrival), unused (those without) and is_constant (whether all steps have used the same).)")
      .def_property(
          "last_error", py::cpp_function(&Reducer::last_error, release_gil()),
          py::cpp_function(&Reducer::set_last_error, release_gil()))
      .def(
          "start_recording", [](Reducer& self) { self.pipeline().recorder().start(); },
          release_gil(), R"(
Record when each activity happens, until `stop_recording`. Each activity takes 80 bytes.)")
      .def("stop_recording", &stop_recording, R"(
End the recording, and return one dict per activity: activity (backward, drain, gradient, pack,
launch, hook, wait or unpack), index (of the parameter for gradient, of the step for backward and
drain, else of the bucket), start_ns and end_ns (of `time.monotonic_ns`; equal for gradient).
Activity hook also has key and names of the bucket, and hook, the name of the hook. The order is
unspecified.)")
      .def("abort", in_pipeline(&Pipeline::abort), release_gil())
      .def("bucket_stats", &bucket_stats, R"(
Return one dict per bucket: index, names, key, indices (of parameters), gradient_bytes, group
(the index of its reduction group, 0 for the hook that was set), is_sparse, ranks (the number of
ranks that it is averaged over); and since the last reset: steps, packed_bytes (handed to the
hook), hook_seconds (from launch to completion) and exposed_seconds (the time that the thread
which runs backward spent in the hook or waiting for it).)")
      .def("reset_stats", in_pipeline(&Pipeline::reset_stats), release_gil())
      .def_property(
          "steps", py::cpp_function(in_pipeline(&Pipeline::steps), release_gil()),
          py::cpp_function(in_pipeline(&Pipeline::set_steps), release_gil()));
}

}  // namespace commhooks
