#include "bindings/commhooks/register.h"
#include "sparse/indices.h"
#include "sparse/selection.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace commhooks {

void register_sparse(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def(
      "select_largest", &select_largest, no_gil, py::arg("gradient"), py::arg("error"),
      py::arg("count"), R"(
Add error to gradient, and return the indices of the largest elements. See
csrc/sparse/selection.h.)");
  module.def(
      "select_largest_of_chunks", &select_largest_of_chunks, no_gil, py::arg("gradient"),
      py::arg("error"), py::arg("chunk"), py::arg("count"), R"(
Add error to gradient, and return the indices of the largest elements of each chunk.)");
  module.def(
      "select_above", &select_above, no_gil, py::arg("gradient"), py::arg("error"),
      py::arg("threshold"), R"(
Add error to gradient, and return the indices of the elements that reach the threshold.)");
  module.def(
      "pack_indices", &pack_indices, no_gil, py::arg("indices"), py::arg("high_bits"),
      py::arg("low_bits"), py::arg("adds_rank"), py::arg("out"), R"(
Write ascending indices as a bitmap and low bits. See csrc/sparse/indices.h.)");
  module.def(
      "unpack_indices", &unpack_indices, no_gil, py::arg("packed"), py::arg("high_bits"),
      py::arg("low_bits"), py::arg("adds_rank"), py::arg("numel"), py::arg("out"), R"(
Read and check the result of pack_indices.)");
  module.def(
      "scatter_add", &scatter_add, no_gil, py::arg("values"), py::arg("indices"), py::arg("out"),
      R"(
Add values to out at ascending indices.)");
  module.def(
      "draw_indices", &draw_indices, no_gil, py::arg("seed"), py::arg("rotation"), py::arg("numel"),
      py::arg("out"), R"(
Fill out with distinct, ascending indices below numel. See csrc/sparse/indices.h.)");
}

}  // namespace commhooks
