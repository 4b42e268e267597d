#include "bindings/reducer/register.h"
#include "bindings/shared.h"
#include "reducer/peers.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

namespace py = pybind11;

namespace commhooks {
namespace {

// Rethrows the current exception, as CommHookPeerError if reducer/peers.py attributes it to a lost
// peer; in a form that autograd passes from its threads to the caller of backward.
void rethrow_as_peer_error(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& what) {
  py::gil_scoped_acquire gil;
  torch::translate_exception_to_python(std::current_exception());
  py::error_already_set original;
  const py::object meant =
      py::module_::import("reducer.peers").attr("peer_error")(group, what, original.value());
  if (meant.is(original.value())) {
    original.restore();
  } else {
    PyErr_SetObject(py::type::handle_of(meant).ptr(), meant.ptr());
  }
  python_error error;  // unlike `original`, it can be translated to Python twice
  error.persist();
  throw std::move(error);
}

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
}  // namespace commhooks

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The engine: the reducer, its buckets, its native hooks, and packing.";
  commhooks::register_shared(module);
  commhooks::register_grad_bucket(module);
  commhooks::register_packing(module);
  commhooks::register_reducer(module);
  commhooks::throw_peer_error = &commhooks::rethrow_as_peer_error;
  module.def(
      "are_values", &commhooks::are_values, py::arg("dicts"), py::arg("values"),
      "Return whether `values` are the objects in these dictionaries, in their order.");
  module.def(
      "any_requires_grad", &commhooks::any_requires_grad, py::arg("tensors"),
      "Return whether any of these tensors requires a gradient.");
}
