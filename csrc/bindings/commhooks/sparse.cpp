#include "bindings/commhooks/register.h"
#include "sparse/selection.h"
#include "sparse/indices.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace commhooks {

void register_sparse(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def(
      "select_largest", &select_largest, no_gil, py::arg("gradient"), py::arg("error"),
      py::arg("count"), R"(
Adds error to gradient, and returns the indices of the largest. See csrc/sparse/selection.h.)");
  module.def(
      "select_above", &select_above, no_gil, py::arg("gradient"), py::arg("error"),
      py::arg("threshold"), R"(
Adds error to gradient, and returns the indices of those that reach the threshold.)");
  module.def(
      "pack_indices", &pack_indices, no_gil, py::arg("indices"), py::arg("high_bits"),
      py::arg("low_bits"), py::arg("adds_rank"), py::arg("out"), R"(
Writes ascending indices as a bitmap and low bits. See csrc/sparse/indices.h.)");
  module.def(
      "unpack_indices", &unpack_indices, no_gil, py::arg("packed"), py::arg("high_bits"),
      py::arg("low_bits"), py::arg("adds_rank"), py::arg("numel"), py::arg("out"), R"(
Reads what pack_indices wrote, and checks it.)");
  module.def(
      "scatter_add", &scatter_add, no_gil, py::arg("values"), py::arg("indices"), py::arg("out"),
      R"(
Adds values to out at ascending indices.)");
  module.def(
      "draw_indices", &draw_indices, no_gil, py::arg("seed"), py::arg("rotation"), py::arg("numel"),
      py::arg("out"), R"(
Fills out with different, ascending indices below numel. See csrc/sparse/indices.h.)");
}

}  // namespace commhooks
