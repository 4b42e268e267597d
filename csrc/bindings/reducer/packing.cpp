#include "bindings/reducer/register.h"
#include "packing/copier.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace commhooks {
namespace {

// Copies tensors to or from consecutive parts of a flat tensor, each in its own memory order.
class FlatCopy {
 public:
  explicit FlatCopy(const at::Tensor& flat)
      : copier_(flat.device()), flat_(flat), next_(static_cast<char*>(flat.data_ptr())) {
    TORCH_CHECK_VALUE(
        flat.is_contiguous(), "Expected a contiguous flat tensor, found strides ", flat.strides(),
        ".");
  }

  void pack(
      const std::vector<at::Tensor>& tensors,
      double scale,
      const std::optional<at::Tensor>& finite) {
    TORCH_CHECK_VALUE(
        !finite ||
            (finite->scalar_type() == c10::kBool && finite->numel() == 1 &&
             finite->device() == flat_.device()),
        "Expected `finite` to be one bool on ", flat_.device(), ".");
    for (const at::Tensor& tensor : tensors) {
      void* place = advance(tensor);
      pieces_.push_back({tensor.const_data_ptr(), place, tensor.numel()});
    }
    copier_.copy_pieces(
        pieces_, type_of(tensors), flat_.scalar_type(), scale, true, finite.value_or(at::Tensor()));
  }

  void unpack(const std::vector<at::Tensor>& tensors, double scale) {
    for (const at::Tensor& tensor : tensors) {
      const void* place = advance(tensor);
      pieces_.push_back({place, tensor.mutable_data_ptr(), tensor.numel()});
    }
    copier_.copy_pieces(pieces_, flat_.scalar_type(), type_of(tensors), scale, true, {});
  }

 private:
  void* advance(const at::Tensor& tensor) {
    TORCH_CHECK_VALUE(
        copier_.copies_pieces(), "This build has no kernels for tensors on ", flat_.device(), ".");
    TORCH_CHECK_VALUE(
        tensor.is_non_overlapping_and_dense() && tensor.device() == flat_.device() &&
            (used_ += tensor.numel()) <= flat_.numel(),
        "Expected dense tensors on ", flat_.device(), " with at most ", flat_.numel(),
        " elements in total, found shape ", tensor.sizes(), " with strides ", tensor.strides(),
        " on ", tensor.device(), ".");
    void* place = next_;
    next_ += tensor.numel() * flat_.itemsize();
    return place;
  }

  c10::ScalarType type_of(const std::vector<at::Tensor>& tensors) const {
    for (const at::Tensor& tensor : tensors) {
      TORCH_CHECK_VALUE(
          tensor.scalar_type() == tensors.front().scalar_type(),
          "Expected tensors of one dtype, found ", tensors.front().scalar_type(), " and ",
          tensor.scalar_type(), ".");
    }
    return tensors.empty() ? flat_.scalar_type() : tensors.front().scalar_type();
  }

  Copier copier_;
  at::Tensor flat_;
  char* next_;
  int64_t used_ = 0;
  std::vector<Piece> pieces_;
};

}  // namespace

void register_packing(py::module_& module) {
  module.def(
      "pack",
      [](const std::vector<at::Tensor>& tensors, const at::Tensor& flat, double scale,
         const std::optional<at::Tensor>& finite) { FlatCopy(flat).pack(tensors, scale, finite); },
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
        FlatCopy(flat).unpack(tensors, scale);
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
