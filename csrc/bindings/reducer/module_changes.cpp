#include "bindings/reducer/register.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

namespace py = pybind11;

namespace commhooks {
namespace {

bool are_values(const py::list& dicts, const py::list& values) {
  Py_ssize_t count = 0;
  for (const py::handle dict : dicts) {
    Py_ssize_t position = 0;
    PyObject* value = nullptr;
    while (PyDict_Next(dict.ptr(), &position, nullptr, &value)) {
      if (count == PyList_GET_SIZE(values.ptr()) ||
          PyList_GET_ITEM(values.ptr(), count++) != value) {
        return false;
      }
    }
  }
  return count == PyList_GET_SIZE(values.ptr());
}

bool any_requires_grad(const py::list& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const py::handle tensor) {
    return THPVariable_Unpack(tensor.ptr()).requires_grad();
  });
}

}  // namespace

void register_module_changes(py::module_& module) {
  module.def(
      "are_values", &are_values, py::arg("dicts"), py::arg("values"),
      "Return whether `values` are the objects in these dictionaries, in their order.");
  module.def(
      "any_requires_grad", &any_requires_grad, py::arg("tensors"),
      "Return whether any of these tensors requires a gradient.");
}

}  // namespace commhooks
