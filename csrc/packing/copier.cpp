#include "packing/copier.h"

#include "packing/convert.h"
#include "shared/finite.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <c10/util/Exception.h>
#ifdef COMMHOOKS_WITH_CUDA
#include "packing/cuda/convert.h"
#include "packing/elements.h"

#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>
#endif

namespace commhooks {
namespace {

#ifdef COMMHOOKS_WITH_CUDA
cuda::Element element_of(c10::ScalarType type) {
  return with_type(type, []<typename T>() {
    return std::is_same_v<T, double>   ? cuda::Element::fp64
        : std::is_same_v<T, float>     ? cuda::Element::fp32
        : std::is_same_v<T, c10::Half> ? cuda::Element::fp16
                                       : cuda::Element::bf16;
  });
}
#endif

bool has_kernels(c10::Device device) {
#ifdef COMMHOOKS_WITH_CUDA
  if (device.is_cuda()) {
    const c10::OptionalDeviceGuard guard(device.has_index() ? std::optional(device) : std::nullopt);
    return cuda::has_image();
  }
#endif
  return device.is_cpu();
}

}  // namespace

Copier::Copier(c10::Device device) : device_(device), copies_pieces_(has_kernels(device)) {}

void Copier::copy_pieces(
    const std::vector<Piece>& pieces,
    c10::ScalarType from,
    c10::ScalarType to,
    double scale,
    bool leaves_cache,
    const at::Tensor& finite) const {
  TORCH_INTERNAL_ASSERT(copies_pieces_ || pieces.empty());
  if (pieces.empty()) {
    return;
  }
  bool* const is_finite = finite.defined() ? finite.mutable_data_ptr<bool>() : nullptr;
#ifdef COMMHOOKS_WITH_CUDA
  if (device_.is_cuda()) {
    const c10::DeviceGuard guard(device_);
    const char* const error = cuda::convert(
        pieces.data(), pieces.size(), element_of(from), element_of(to), scale, is_finite,
        c10::cuda::getCurrentCUDAStream(device_.index()).stream());
    TORCH_CHECK(
        error == nullptr, "The kernel that copies gradients could not be launched: ", error);
    return;
  }
#endif
  convert(pieces, from, to, scale, leaves_cache, is_finite);
}

void copy_tensors(
    const std::vector<at::Tensor>& sources,
    const std::vector<at::Tensor>& destinations,
    double scale,
    const at::Tensor& finite) {
  if (destinations.empty()) {
    return;
  }
  // Scaled in a type that holds the numbers of both, and then rounded, as pieces are.
  const auto to = destinations.front().scalar_type();
  const auto wide = c10::promoteTypes(sources.front().scalar_type(), to);
  if (scale == 1.0) {
    at::_foreach_copy_(destinations, sources);
  } else if (wide == to) {
    at::_foreach_copy_(destinations, sources);
    at::_foreach_mul_(destinations, scale);
  } else {
    std::vector<at::Tensor> widened;
    for (const at::Tensor& source : sources) {
      widened.push_back(source.to(wide));
    }
    at::_foreach_copy_(destinations, at::_foreach_mul(widened, scale));
  }
  if (finite.defined()) {
    for (const at::Tensor& destination : destinations) {
      finite.logical_and_(all_finite(destination));
    }
  }
}

}  // namespace commhooks
