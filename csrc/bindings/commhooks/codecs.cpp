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
      "level_codec",
      [](int64_t bits, int64_t levels, const std::string& norm, double clip, bool stochastic,
         int64_t block_size) {
        return CpuBlockCodec(level_loops(bits, levels, norm, clip, stochastic), block_size);
      },
      py::arg("bits"), py::arg("levels"), py::arg("norm"), py::arg("clip"), py::arg("stochastic"),
      py::arg("block_size"), "Return a codec for integers from -levels to levels.");
  module.def(
      "fp8_codec",
      [](const std::string& number_format, int64_t block_size) {
        return CpuBlockCodec(fp8_loops(number_format), block_size);
      },
      py::arg("number_format"), py::arg("block_size"),
      "Return a codec for 8-bit floating point: e4m3 or e5m2.");
  module.def(
      "fp4_codec",
      [](const std::string& number_format, int64_t block_size) {
        return CpuBlockCodec(fp4_loops(number_format), block_size);
      },
      py::arg("number_format"), py::arg("block_size"),
      "Return a codec for 4-bit floating point: mxfp4 or nvfp4, with a scale per group, or e3m0.");
  module.def(
      "natural_codec",
      [](int64_t block_size) { return CpuBlockCodec(natural_loops(), block_size); },
      py::arg("block_size"), "Return a codec for powers of two, rounded stochastically.");
  module.def(
      "sign_codec",
      [](const std::string& norm, bool majority, int64_t block_size) {
        return CpuBlockCodec(sign_loops(norm, majority), block_size);
      },
      py::arg("norm"), py::arg("majority"), py::arg("block_size"), "Return a codec for signs.");
  module.def(
      "rotate", &rotate, no_gil, py::arg("values"), py::arg("added"), py::arg("part_length"),
      py::arg("inverse"), R"(
Set values to the rotation of values + added, part by part; with inverse, rotate back.)");
}

}  // namespace commhooks
