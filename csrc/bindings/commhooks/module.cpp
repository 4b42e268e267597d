#include "bindings/commhooks/register.h"
#include "bindings/shared.h"
#include "shared/finite.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The arithmetic of communication hooks on the CPU, and helpers for collectives.";
  commhooks::register_shared(module);
  commhooks::register_codecs(module);
  commhooks::register_comm(module);
  commhooks::register_kernel_arguments(module);
  commhooks::register_lowrank(module);
  commhooks::register_sparse(module);
  module.def(
      "all_finite", &commhooks::all_finite, py::arg("tensor"),
      py::call_guard<py::gil_scoped_release>(), R"(
Return whether all numbers are finite, as a () bool tensor on the tensor's device, without
waiting for the device.)");
}
