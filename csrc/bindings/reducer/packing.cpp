#include "bindings/reducer/register.h"
#include "packing/copier.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace commhooks {
namespace {

// Copies dense tensors into consecutive parts of `flat` if `packs`, otherwise back, each in its own
// memory order.
void copy(
    const std::vector<at::Tensor>& tensors,
    const at::Tensor& flat,
    double scale,
    const std::optional<at::Tensor>& finite,
    bool packs) {
  const auto copier = make_copier(flat.device());
  TORCH_CHECK_VALUE(
      flat.is_contiguous(), "Expected a contiguous flat tensor, found strides ", flat.strides(),
      ".");
  TORCH_CHECK_VALUE(
      !finite ||
          (finite->scalar_type() == c10::kBool && finite->numel() == 1 &&
           finite->device() == flat.device()),
      "Expected `finite` to be one bool on ", flat.device(), ".");
  TORCH_CHECK_VALUE(
      tensors.empty() || copier->copies_pieces(), "This build has no kernels for tensors on ",
      flat.device(), ".");
  const auto type = tensors.empty() ? flat.scalar_type() : tensors.front().scalar_type();
  auto* place = static_cast<char*>(flat.data_ptr());
  int64_t used = 0;
  std::vector<Piece> pieces;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(
        tensor.is_non_overlapping_and_dense() && tensor.device() == flat.device() &&
            (used += tensor.numel()) <= flat.numel(),
        "Expected dense tensors on ", flat.device(), " with at most ", flat.numel(),
        " elements in total, found shape ", tensor.sizes(), " with strides ", tensor.strides(),
        " on ", tensor.device(), ".");
    TORCH_CHECK_VALUE(
        tensor.scalar_type() == type, "Expected tensors of one dtype, found ", type, " and ",
        tensor.scalar_type(), ".");
    pieces.push_back(
        packs ? Piece{tensor.const_data_ptr(), place, tensor.numel()}
              : Piece{place, tensor.mutable_data_ptr(), tensor.numel()});
    place += tensor.numel() * flat.itemsize();
  }
  copier->copy_pieces(
      pieces, packs ? type : flat.scalar_type(), packs ? flat.scalar_type() : type, scale,
      /*leaves_cache=*/true, finite.value_or(at::Tensor()));
}

}  // namespace

void register_packing(py::module_& module) {
  module.def(
      "pack",
      [](const std::vector<at::Tensor>& tensors, const at::Tensor& flat, double scale,
         const std::optional<at::Tensor>& finite) {
        copy(tensors, flat, scale, finite, /*packs=*/true);
      },
      py::arg("tensors"), py::arg("flat"), py::arg("scale") = 1.0, py::arg("finite") = py::none(),
      py::call_guard<py::gil_scoped_release>(),
      R"(
Copy dense tensors one after the other into `flat`, each in its own memory order, scaled and cast
to the dtype of `flat`, as buckets are packed. `finite`, one bool on the same device, becomes
false if a number in `flat` is not finite. On CUDA one kernel, enqueued on the current stream.
Raises ValueError if tensors do not fit, or if `has_kernels` is false.)");
  module.def(
      "unpack",
      [](const at::Tensor& flat, const std::vector<at::Tensor>& tensors, double scale) {
        copy(tensors, flat, scale, std::nullopt, /*packs=*/false);
      },
      py::arg("flat"), py::arg("tensors"), py::arg("scale") = 1.0,
      py::call_guard<py::gil_scoped_release>(),
      "Copy the parts of `flat` back into dense tensors, the reverse of `pack`.");
  module.def(
      "has_kernels",
      [](const std::string& device) { return make_copier(c10::Device(device))->copies_pieces(); },
      py::arg("device"), R"(
Return whether this build has kernels that pack buckets on devices of this type; otherwise torch's
operations are used.)");
}

}  // namespace commhooks
