#include "reducer/peers.h"

#include "bindings/reducer/register.h"

#include <torch/csrc/Exceptions.h>

namespace py = pybind11;

namespace commhooks {
namespace {

// Asks reducer/peers.py what the C++ exception under way means.
void throw_what_it_means(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& what) {
  py::gil_scoped_acquire gil;
  torch::translate_exception_to_python(std::current_exception());
  const py::error_already_set original;
  const py::object meant =
      py::module_::import("reducer.peers").attr("peer_error")(group, what, original.value());
  if (meant.is(original.value())) {
    return;
  }
  PyErr_SetObject(py::type::handle_of(meant).ptr(), meant.ptr());
  python_error error;  // which autograd passes from its threads to the caller of backward
  error.persist();
  throw std::move(error);
}

}  // namespace

void register_peers() {
  throw_peer_error = &throw_what_it_means;
}

}  // namespace commhooks
