#include "reducer/grad_bucket.h"
#include "bindings/reducer/register.h"

namespace py = pybind11;

namespace commhooks {
namespace {

std::shared_ptr<GradBucket> make_grad_bucket(
    at::Tensor buffer,
    std::vector<at::Tensor> parameters,
    std::vector<std::string> names,
    size_t index,
    bool is_last,
    int64_t step,
    std::vector<std::string> left_out) {
  auto layout = make_bucket_layout(std::move(parameters), std::move(names));
  const int64_t expected = layout->offsets.empty()
      ? 0
      : static_cast<int64_t>(layout->offsets.back() + layout->lengths.back());
  TORCH_CHECK_VALUE(
      buffer.dim() == 1 && buffer.numel() == expected,
      "Expected a bucket buffer with one dimension and one element per gradient element, ",
      expected, " for these parameters, found shape ", buffer.sizes(), ".");
  return std::make_shared<GradBucket>(
      std::move(layout), std::move(buffer), index, is_last, step,
      std::make_shared<const std::vector<std::string>>(std::move(left_out)));
}

py::list shapes(const GradBucket& bucket) {
  const auto size_type = py::module_::import("torch").attr("Size");
  py::list result;
  for (const auto& parameter : bucket.layout().parameters) {
    result.append(size_type(parameter.sizes().vec()));
  }
  return result;
}

}  // namespace

void register_grad_bucket(py::module_& module) {
  // Importing torch.distributed registers the base class.
  py::module_::import("torch.distributed");
  py::class_<GradBucket, c10d::GradBucket, std::shared_ptr<GradBucket>>(module, "GradBucket", R"(
The bucket that a communication hook gets: gradients that are reduced together.

A subclass of `torch.distributed.GradBucket`, so hooks written for torch accept it.)")
      .def(
          py::init(&make_grad_bucket), py::arg("buffer"), py::arg("parameters"), py::arg("names"),
          py::kw_only(), py::arg("index") = 0, py::arg("is_last") = true, py::arg("step") = 0,
          py::arg("left_out") = std::vector<std::string>(),
          R"(
`buffer`: the gradients one after the other, without padding; its shape is (sum of numel of
`parameters`,).)")
      .def("index", &GradBucket::getIndex, "Return the index among the buckets of this step.")
      .def(
          "buffer", [](GradBucket& self) { return self.getBuffer(); },
          "Return the flat (numel,) tensor with all gradients of the bucket.")
      .def(
          "set_buffer", [](GradBucket& self, at::Tensor buffer) { self.setBuffer(buffer); },
          py::arg("buffer"), "Replace the buffer with another tensor.")
      .def("gradients", &GradBucket::gradients, R"(
Return one view of the buffer per parameter, in the shape and memory format of the parameter.)")
      .def(
          "parameters", [](const GradBucket& self) { return self.layout().parameters; },
          "Return the parameters, in the order of `gradients()`.")
      .def("all_finite", &GradBucket::all_finite, py::call_guard<py::gil_scoped_release>(), R"(
Return whether all numbers in the buffer are finite on this rank, as a () bool tensor on the
device of the buffer, without waiting for the device. Free of cost if the `checks_finite` of the
hook made packing check it and torch has not changed the buffer since; otherwise one pass over
the buffer. Call it before collectives, because torch does not count their changes.)")
      .def("is_last", &GradBucket::isLast, "Return whether this is the last bucket of the step.")
      .def_property_readonly(
          "names", [](const GradBucket& self) { return self.layout().names; },
          "Parameter names, in the order of `gradients()`.")
      .def_property_readonly(
          "offsets", [](const GradBucket& self) { return self.layout().offsets; },
          "Offset of each gradient in the buffer, in elements.")
      .def_property_readonly(
          "lengths", [](const GradBucket& self) { return self.layout().lengths; },
          "Number of elements of each gradient.")
      .def_property_readonly("shapes", &shapes, "Shape of each gradient.")
      .def_property_readonly(
          "key", [](const GradBucket& self) { return self.layout().key; },
          "Digest of `names`, the same across processes and restarts.")
      .def_property_readonly(
          "step", &GradBucket::step, "Number of synchronized backward passes before this one.")
      .def_property_readonly(
          "left_out", &GradBucket::left_out,
          "Names of the parameters whose buckets no hook gets in this step, as no rank uses them.");
}

}  // namespace commhooks
