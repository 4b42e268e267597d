#include "bindings/commhooks/kernel_arguments.h"
#include "bindings/shared.h"
#include "codecs/block_codec.h"
#include "codecs/rotation.h"
#include "codecs/rounding.h"
#include "comm/joined_work.h"
#include "comm/ring_gather.h"
#include "lowrank/products.h"
#include "shared/finite.h"
#include "sparse/indices.h"
#include "sparse/selection.h"

namespace py = pybind11;

namespace commhooks {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

void register_comm(py::module_& module) {
  module.def(
      "join_works",
      [](std::vector<WorkPtr> works) -> WorkPtr {
        return c10::make_intrusive<JoinedWork>(std::move(works));
      },
      py::arg("works"));
  module.def(
      "ring_gather",
      [](c10::intrusive_ptr<c10d::Backend> group, std::vector<at::Tensor> parts) -> WorkPtr {
        return c10::make_intrusive<RingGather>(std::move(group), std::move(parts));
      },
      py::arg("group"), py::arg("parts"), NoGil());
}

void register_arithmetic(py::module_& module) {
  const auto def = [&](const char* name, auto function) { module.def(name, function, NoGil()); };
  def("all_finite", &all_finite);
  def("apply_factors", &apply_factors);
  def("draw_indices", &draw_indices);
  def("pack_indices", &pack_indices);
  def("project_left", &project_left);
  def("project_right", &project_right);
  def("rotate", &rotate);
  def("round_stochastically", &round_stochastically);
  def("scatter_add", &scatter_add);
  def("select_above", &select_above);
  def("select_largest", &select_largest);
  def("select_largest_of_chunks", &select_largest_of_chunks);
  def("unpack_indices", &unpack_indices);
  py::class_<CpuBlockCodec>(module, "CpuBlockCodec")
      .def(py::init([](const py::object& format, int64_t block_size) {
        const auto option = [&](const char* name) { return format.attr(name); };
        return CpuBlockCodec(
            {.codes = option("codes").cast<std::string>(),
             .bits = option("bits").cast<int>(),
             .group = option("group").cast<int>(),
             .norm = static_cast<codecs::Norm>(option("norm").cast<int>()),
             .levels = option("levels").cast<float>(),
             .clip = option("clip").cast<float>(),
             .is_vote = option("is_vote").cast<bool>()},
            block_size);
      }))
      .def("encode", &CpuBlockCodec::encode, NoGil())
      .def("average", &CpuBlockCodec::average, NoGil())
      .def("assemble", &CpuBlockCodec::assemble, NoGil());
}

}  // namespace
}  // namespace commhooks

// commhooks/_C.pyi has the types, and the headers say what functions do.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The arithmetic of communication hooks on the CPU, and helpers for collectives.";
  commhooks::register_shared(module);
  commhooks::register_comm(module);
  module.def("write_arguments", &commhooks::write_arguments, pybind11::arg("arguments"));
  commhooks::register_arithmetic(module);
}
