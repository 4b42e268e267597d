#include "bindings/commhooks/register.h"
#include "codecs/block_codec.h"
#include "codecs/rotation.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace commhooks {

void register_codecs(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<CpuBlockCodec>(module, "CpuBlockCodec", R"(
Encodes numbers as blocks of codes with one float32 scale each. See csrc/codecs/block_codec.h.)")
      .def(
          py::init([](std::string codes, int norm, float levels, float clip, bool is_vote,
                      int64_t block_size) {
            const auto of_block = static_cast<codecs::Norm>(norm);
            return CpuBlockCodec({std::move(codes), of_block, levels, clip, is_vote}, block_size);
          }),
          py::arg("codes"), py::arg("norm"), py::arg("levels"), py::arg("clip"), py::arg("is_vote"),
          py::arg("block_size"), "Take a format of commhooks/codecs/formats.py.")
      .def("encoded_bytes", &CpuBlockCodec::encoded_bytes, py::arg("part_length"))
      .def(
          "encode", &CpuBlockCodec::encode, no_gil, py::arg("values"), py::arg("messages"),
          py::arg("part_length"), py::arg("error"), py::arg("seed"), py::arg("keep_residual"), R"(
Write the messages of values + error; with keep_residual, write the error of the encoding to
values.)")
      .def(
          "average", &CpuBlockCodec::average, no_gil, py::arg("messages"), py::arg("values"),
          py::arg("part_length"), "Write the mean of the messages to values.")
      .def(
          "assemble", &CpuBlockCodec::assemble, no_gil, py::arg("messages"), py::arg("values"),
          py::arg("part_length"), py::arg("kept"), R"(
Decode the messages of all parts to values, after copying the former values to `kept`, if given.
If a message is not finite, write NaN to values, do not change `kept`, and return False.)");
  module.def(
      "rotate", &rotate, no_gil, py::arg("values"), py::arg("added"), py::arg("part_length"),
      py::arg("inverse"), R"(
Set values to the rotation of values + added, part by part; with inverse, rotate back.)");
}

}  // namespace commhooks
