#include "bindings/register_apis.h"
#include "cpu/block_codec.h"

#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace commhooks {

void register_codecs(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<BlockCodec>(module, "BlockCodec", R"(
Numbers as blocks of codes with one float32 scale each. See csrc/cpu/block_codec.h.)")
      .def("encoded_bytes", &BlockCodec::encoded_bytes, py::arg("numel"))
      .def(
          "encode", &BlockCodec::encode, no_gil, py::arg("values"), py::arg("message"),
          py::arg("error"), py::arg("seed"), py::arg("keep_residual"), R"(
Writes the message of values + error; values become what it leaves out, if that is to be kept.)")
      .def(
          "decode", &BlockCodec::decode, no_gil, py::arg("messages"), py::arg("values"),
          py::arg("kept"), R"(
Writes the mean of the messages; what the values were before goes to `kept`, if given.)")
      .def("is_finite", &BlockCodec::is_finite, no_gil, py::arg("messages"), py::arg("numel"), R"(
Whether all scales are.)");
  module.def(
      "level_codec",
      [](int64_t bits, int64_t levels, const std::string& norm, double clip, bool stochastic,
         int64_t block_size) {
        return BlockCodec(level_loops(bits, levels, norm, clip, stochastic), block_size);
      },
      py::arg("bits"), py::arg("levels"), py::arg("norm"), py::arg("clip"), py::arg("stochastic"),
      py::arg("block_size"), "Integers from -levels to levels.");
  module.def(
      "fp8_codec",
      [](const std::string& number_format, int64_t block_size) {
        return BlockCodec(fp8_loops(number_format), block_size);
      },
      py::arg("number_format"), py::arg("block_size"), "8-bit floating point: e4m3 or e5m2.");
  module.def(
      "natural_codec", [](int64_t block_size) { return BlockCodec(natural_loops(), block_size); },
      py::arg("block_size"), "Powers of two, rounded stochastically.");
  module.def(
      "sign_codec",
      [](const std::string& norm, bool majority, int64_t block_size) {
        return BlockCodec(sign_loops(norm, majority), block_size);
      },
      py::arg("norm"), py::arg("majority"), py::arg("block_size"), "Signs.");
}

}  // namespace commhooks
