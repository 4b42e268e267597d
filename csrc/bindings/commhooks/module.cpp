#include "bindings/commhooks/register.h"
#include "bindings/shared.h"
#include "codecs/block_codec.h"
#include "codecs/rotation.h"
#include "lowrank/products.h"
#include "shared/finite.h"
#include "sparse/indices.h"
#include "sparse/selection.h"

namespace py = pybind11;

// commhooks/_C.pyi has the types, and the headers say what functions do.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  using commhooks::CpuBlockCodec;

  module.doc() = "The arithmetic of communication hooks on the CPU, and helpers for collectives.";
  commhooks::register_shared(module);
  commhooks::register_comm(module);
  commhooks::register_kernel_arguments(module);

  const auto def = [&](const char* name, auto function) { module.def(name, function, NoGil()); };
  def("all_finite", &commhooks::all_finite);
  def("apply_factors", &commhooks::apply_factors);
  def("draw_indices", &commhooks::draw_indices);
  def("pack_indices", &commhooks::pack_indices);
  def("project_left", &commhooks::project_left);
  def("project_right", &commhooks::project_right);
  def("rotate", &commhooks::rotate);
  def("scatter_add", &commhooks::scatter_add);
  def("select_above", &commhooks::select_above);
  def("select_largest", &commhooks::select_largest);
  def("select_largest_of_chunks", &commhooks::select_largest_of_chunks);
  def("unpack_indices", &commhooks::unpack_indices);
  py::class_<CpuBlockCodec>(module, "CpuBlockCodec")
      .def(
          py::init([](std::string codes, int norm, float levels, float clip, bool is_vote,
                      int64_t block_size) {
            const auto of_block = static_cast<commhooks::codecs::Norm>(norm);
            return CpuBlockCodec({std::move(codes), of_block, levels, clip, is_vote}, block_size);
          }))
      .def("encode", &CpuBlockCodec::encode, NoGil())
      .def("average", &CpuBlockCodec::average, NoGil())
      .def("assemble", &CpuBlockCodec::assemble, NoGil());
}
