#include "bindings/reducer/register.h"
#include "packing/copier.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace commhooks {
namespace {

// Copies dense tensors to consecutive parts of a flat tensor, each in its own memory order, or from
// there.
void copy_flat(
    const std::vector<at::Tensor>& tensors,
    const at::Tensor& flat,
    bool packs,
    double scale,
    const std::optional<at::Tensor>& finite) {
  TORCH_CHECK_VALUE(
      flat.is_contiguous(), "Expected a contiguous flat tensor, found strides ", flat.strides(),
      ".");
  TORCH_CHECK_VALUE(
      !finite ||
          (finite->scalar_type() == c10::kBool && finite->numel() == 1 &&
           finite->device() == flat.device()),
      "Expected `finite` to be one bool on ", flat.device(), ".");
  const Copier copier(flat.device());
  const auto dtype = tensors.empty() ? flat.scalar_type() : tensors.front().scalar_type();
  std::vector<Piece> pieces;
  int64_t used = 0;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(
        copier.copies_pieces(), "This build has no kernels for tensors on ", flat.device(), ".");
    char* place = static_cast<char*>(flat.data_ptr()) + used * flat.itemsize();
    used += tensor.numel();
    TORCH_CHECK_VALUE(
        tensor.is_non_overlapping_and_dense() && !tensor.is_neg() &&
            tensor.device() == flat.device() && used <= flat.numel(),
        "Expected dense tensors on ", flat.device(), " with at most ", flat.numel(),
        " elements in total, found shape ", tensor.sizes(), " with strides ", tensor.strides(),
        " on ", tensor.device(), ".");
    TORCH_CHECK_VALUE(
        tensor.scalar_type() == dtype, "Expected tensors of one dtype, found ", dtype, " and ",
        tensor.scalar_type(), ".");
    pieces.push_back(
        packs ? Piece{tensor.const_data_ptr(), place, tensor.numel()}
              : Piece{place, tensor.mutable_data_ptr(), tensor.numel()});
  }
  copier.copy_pieces(
      pieces, packs ? dtype : flat.scalar_type(), packs ? flat.scalar_type() : dtype, scale, true,
      finite.value_or(at::Tensor()));
}

}  // namespace

void register_packing(py::module_& module) {
  module.def(
      "pack",
      [](const std::vector<at::Tensor>& tensors, const at::Tensor& flat, double scale,
         const std::optional<at::Tensor>& finite) {
        copy_flat(tensors, flat, /*packs=*/true, scale, finite);
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
        copy_flat(tensors, flat, /*packs=*/false, scale, {});
      },
      py::arg("flat"), py::arg("tensors"), py::arg("scale") = 1.0,
      py::call_guard<py::gil_scoped_release>(),
      "Copy the parts of `flat` back into dense tensors, the reverse of `pack`.");
  module.def(
      "has_kernels",
      [](const std::string& device) { return Copier(c10::Device(device)).copies_pieces(); },
      py::arg("device"), R"(
Return whether this build has kernels that pack buckets on devices of this type; otherwise torch's
operations are used.)");
}

}  // namespace commhooks
