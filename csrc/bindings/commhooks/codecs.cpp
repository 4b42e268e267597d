#include "bindings/commhooks/register.h"
#include "codecs/block_codec.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace commhooks {

void register_codecs(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<CpuBlockCodec>(module, "CpuBlockCodec", R"(
Numbers as blocks of codes with one float32 scale each. See csrc/codecs/block_codec.h.)")
      .def("encoded_bytes", &CpuBlockCodec::encoded_bytes, py::arg("part_length"))
      .def(
          "encode", &CpuBlockCodec::encode, no_gil, py::arg("values"), py::arg("messages"),
          py::arg("part_length"), py::arg("error"), py::arg("seed"), py::arg("keep_residual"), R"(
Writes the messages of values + error; values become what they leave out, if that is to be kept.)")
      .def(
          "average", &CpuBlockCodec::average, no_gil, py::arg("messages"), py::arg("values"),
          py::arg("part_length"), "Writes the mean of the messages.")
      .def(
          "assemble", &CpuBlockCodec::assemble, no_gil, py::arg("messages"), py::arg("values"),
          py::arg("part_length"), py::arg("kept"), R"(
Writes what the messages of all parts tell; what the values were before goes to `kept`, if given.
If a message is not finite writes NaN, leaves `kept` alone, and returns False.)");
  module.def(
      "level_codec",
      [](int64_t bits, int64_t levels, const std::string& norm, double clip, bool stochastic,
         int64_t block_size) {
        return CpuBlockCodec(level_loops(bits, levels, norm, clip, stochastic), block_size);
      },
      py::arg("bits"), py::arg("levels"), py::arg("norm"), py::arg("clip"), py::arg("stochastic"),
      py::arg("block_size"), "Integers from -levels to levels.");
  module.def(
      "fp8_codec",
      [](const std::string& number_format, int64_t block_size) {
        return CpuBlockCodec(fp8_loops(number_format), block_size);
      },
      py::arg("number_format"), py::arg("block_size"), "8-bit floating point: e4m3 or e5m2.");
  module.def(
      "natural_codec", [](int64_t block_size) { return CpuBlockCodec(natural_loops(), block_size); },
      py::arg("block_size"), "Powers of two, rounded stochastically.");
  module.def(
      "sign_codec",
      [](const std::string& norm, bool majority, int64_t block_size) {
        return CpuBlockCodec(sign_loops(norm, majority), block_size);
      },
      py::arg("norm"), py::arg("majority"), py::arg("block_size"), "Signs.");
}

}  // namespace commhooks
