// The arguments of CUDA kernels, from Python's objects.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstring>

namespace commhooks {

// The arguments of a launch, which the driver copies: values of 8 bytes, and the address of each.
struct KernelArguments {
  std::array<uint64_t, 32> values;
  std::array<void*, 32> addresses;

  KernelArguments() {
    for (size_t i = 0; i < values.size(); ++i) {
      addresses[i] = &values[i];
    }
  }
};

// Writes arguments to memory of this thread: for a tensor the address of its memory, for a float a
// double, for an int its lowest 64 bits, for None zeros. Returns the type and index of the device
// of the tensors, and the address of an array with the address of each value; they are valid until
// the next call in this thread. Raises ValueError unless there are tensors, contiguous and on one
// device.
inline pybind11::tuple write_arguments(const pybind11::tuple& arguments) {
  thread_local KernelArguments written;
  TORCH_CHECK_VALUE(
      arguments.size() <= written.values.size(), "expected at most ", written.values.size(),
      " arguments, found ", arguments.size());
  auto* to = written.values.data();
  const at::Tensor* first = nullptr;
  const auto write = [&](auto value) {
    static_assert(sizeof(value) == sizeof(*to));
    std::memcpy(to++, &value, sizeof(value));
  };
  for (const pybind11::handle argument : arguments) {
    if (THPVariable_Check(argument.ptr())) {
      const at::Tensor& tensor = THPVariable_Unpack(argument.ptr());
      first = first == nullptr ? &tensor : first;
      TORCH_CHECK_VALUE(
          tensor.is_contiguous() && tensor.device() == first->device(),
          "expected contiguous tensors on one device, found shape ", tensor.sizes(),
          " with strides ", tensor.strides(), " on ", tensor.device(), " and a tensor on ",
          first->device());
      write(tensor.data_ptr());
    } else if (PyFloat_Check(argument.ptr())) {
      write(PyFloat_AS_DOUBLE(argument.ptr()));
    } else if (argument.is_none()) {
      write(uint64_t{0});
    } else {
      const unsigned long long bits = PyLong_AsUnsignedLongLongMask(argument.ptr());
      if (PyErr_Occurred() != nullptr) {
        throw pybind11::error_already_set();
      }
      write(bits);
    }
  }
  TORCH_CHECK_VALUE(first != nullptr, "expected tensors on a GPU, found none");
  const c10::Device device = first->device();
  return pybind11::make_tuple(
      c10::DeviceTypeName(device.type(), /*lower_case=*/true),
      device.has_index() ? device.index() : 0,
      reinterpret_cast<uintptr_t>(written.addresses.data()));
}

}  // namespace commhooks
