#include "bindings/commhooks/register.h"
#include "lowrank/products.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace commhooks {

void register_lowrank(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def(
      "project_left", &project_left, no_gil, py::arg("error"), py::arg("gradient"),
      py::arg("right"), py::arg("out"), R"(
Write (error + gradient) times the transposed right factors to out, in one pass. See
csrc/lowrank/products.h.)");
  module.def(
      "project_right", &project_right, no_gil, py::arg("error"), py::arg("gradient"),
      py::arg("left"), py::arg("out"), R"(
Write the transposed left factors times (error + gradient) to out, in one pass. See
csrc/lowrank/products.h.)");
  module.def(
      "apply_factors", &apply_factors, no_gil, py::arg("error"), py::arg("gradient"),
      py::arg("own_left"), py::arg("own_right"), py::arg("mean_left"), py::arg("mean_right"), R"(
Subtract own_left times own_right from error + gradient, which becomes the error, and write
mean_left times mean_right to gradient, in one pass.)");
}

}  // namespace commhooks
