#include "bindings/register_apis.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>

namespace py = pybind11;

namespace commhooks {
namespace {

// 8 bytes for each argument of a kernel, from `room` on; returns the device of its tensors.
c10::Device write_arguments(const py::tuple& arguments, uintptr_t room) {
  auto* values = reinterpret_cast<char*>(room);
  const at::Tensor* first = nullptr;
  const auto write = [&](auto value) {
    static_assert(sizeof(value) == 8);
    std::memcpy(values, &value, sizeof(value));
    values += sizeof(value);
  };
  for (const py::handle argument : arguments) {
    if (THPVariable_Check(argument.ptr())) {
      const at::Tensor& tensor = THPVariable_Unpack(argument.ptr());
      first = first == nullptr ? &tensor : first;
      TORCH_CHECK_VALUE(
          tensor.is_contiguous() && tensor.device() == first->device(),
          "expected contiguous tensors on one device, found shape ", tensor.sizes(),
          " with strides ", tensor.strides(), " on ", tensor.device(), ", beside one on ",
          first->device());
      write(tensor.data_ptr());
    } else if (PyFloat_Check(argument.ptr())) {
      write(PyFloat_AS_DOUBLE(argument.ptr()));
    } else if (argument.is_none()) {
      write(uint64_t{0});
    } else {
      const unsigned long long bits = PyLong_AsUnsignedLongLongMask(argument.ptr());
      if (PyErr_Occurred() != nullptr) {
        throw py::error_already_set();
      }
      write(bits);
    }
  }
  TORCH_CHECK_VALUE(first != nullptr, "expected tensors on a GPU, found none");
  return first->device();
}

}  // namespace

void register_kernels(py::module_& module) {
  module.def("write_arguments", &write_arguments, py::arg("arguments"), py::arg("room"), R"(
Writes the arguments of a kernel to the address `room`, 8 bytes for each: of a tensor where its memory
is, of a float a double, of an int its lowest 64 bits, of None zeros. Returns the device of the tensors.
Raises ValueError unless there are some, contiguous, on one device.)");
}

}  // namespace commhooks
