#include "packing/cuda/copier.h"

#include "packing/cuda/convert.h"

#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <optional>

namespace commhooks::cuda {
namespace {

Element element_of(c10::ScalarType type) {
  switch (type) {
    case c10::kDouble:
      return Element::fp64;
    case c10::kFloat:
      return Element::fp32;
    case c10::kHalf:
      return Element::fp16;
    case c10::kBFloat16:
      return Element::bf16;
    default:
      TORCH_CHECK(
          false, "Expected gradients in fp64, fp32, fp16 or bf16 on CUDA, found ", type, ".");
  }
}

}  // namespace

bool has_kernels(c10::Device device) {
  const c10::OptionalDeviceGuard guard(device.has_index() ? std::optional(device) : std::nullopt);
  return has_image();
}

void copy_pieces(
    c10::Device device,
    const std::vector<Piece>& pieces,
    c10::ScalarType from,
    c10::ScalarType to,
    double scale,
    bool* finite) {
  const c10::DeviceGuard guard(device);
  const char* const error = convert(
      pieces.data(), pieces.size(), element_of(from), element_of(to), scale, finite,
      c10::cuda::getCurrentCUDAStream(device.index()).stream());
  TORCH_CHECK(error == nullptr, "The kernel that copies gradients could not be launched: ", error);
}

}  // namespace commhooks::cuda
