#include "packing/cuda/copier.h"

#include "packing/cuda/convert.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/ScalarType.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>
#include <numeric>
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

void check(const char* error) {
  TORCH_CHECK(error == nullptr, "The kernel that copies gradients could not be launched: ", error);
}

bool* place_of(const at::Tensor& finite) {
  return finite.defined() ? finite.mutable_data_ptr<bool>() : nullptr;
}

// Returns nothing if the kernel cannot index all elements.
std::optional<StridedPiece> strided_piece(const at::Tensor& source, const at::Tensor& destination) {
  if (destination.numel() > std::numeric_limits<int32_t>::max()) {
    return std::nullopt;
  }
  std::vector<int64_t> dims(destination.dim());
  std::iota(dims.begin(), dims.end(), 0);
  // In the memory order of the destination, so that writes are coalesced.
  std::stable_sort(dims.begin(), dims.end(), [&](int64_t left, int64_t right) {
    return destination.stride(left) > destination.stride(right);
  });
  StridedPiece piece{};
  piece.source = source.const_data_ptr();
  piece.destination = destination.mutable_data_ptr();
  piece.numel = static_cast<uint32_t>(destination.numel());
  for (const int64_t dim : dims) {
    if (destination.size(dim) == 1) {
      continue;
    }
    if (piece.dims == StridedPiece::kMostDims) {
      return std::nullopt;
    }
    piece.sizes[piece.dims] = static_cast<uint32_t>(destination.size(dim));
    piece.source_strides[piece.dims] = source.stride(dim);
    piece.destination_strides[piece.dims] = destination.stride(dim);
    ++piece.dims;
  }
  return piece;
}

class CudaCopier final : public Copier {
 public:
  explicit CudaCopier(c10::Device device) : device_(device) {}

  bool copies_pieces() const override {
    return true;
  }

  void copy_pieces(
      const std::vector<Piece>& pieces,
      c10::ScalarType from,
      c10::ScalarType to,
      double scale,
      bool /*leaves_cache*/,
      const at::Tensor& finite) const override {
    if (pieces.empty()) {
      return;
    }
    const c10::DeviceGuard guard(device_);
    check(convert(
        pieces.data(), pieces.size(), element_of(from), element_of(to), scale, place_of(finite),
        stream()));
  }

  void copy_tensors(
      const std::vector<at::Tensor>& sources,
      const std::vector<at::Tensor>& destinations,
      double scale,
      const at::Tensor& finite) const override {
    std::vector<StridedPiece> pieces;
    std::vector<at::Tensor> other_sources;
    std::vector<at::Tensor> other_destinations;
    for (size_t i = 0; i < destinations.size(); ++i) {
      // Only ATen handles lazily negated tensors; see torch.Tensor.is_neg.
      const bool is_negated = sources[i].is_neg() || destinations[i].is_neg();
      const auto piece = is_negated ? std::nullopt : strided_piece(sources[i], destinations[i]);
      if (piece) {
        pieces.push_back(*piece);
      } else {
        other_sources.push_back(sources[i]);
        other_destinations.push_back(destinations[i]);
      }
    }
    Copier::copy_tensors(other_sources, other_destinations, scale, finite);
    if (pieces.empty()) {
      return;
    }
    const c10::DeviceGuard guard(device_);
    check(convert_strided(
        pieces.data(), pieces.size(), element_of(sources.front().scalar_type()),
        element_of(destinations.front().scalar_type()), scale, place_of(finite), stream()));
  }

 private:
  cudaStream_t stream() const {
    return c10::cuda::getCurrentCUDAStream(device_.index()).stream();
  }

  c10::Device device_;
};

}  // namespace

std::unique_ptr<Copier> make_copier(c10::Device device) {
  const c10::OptionalDeviceGuard guard(device.has_index() ? std::optional(device) : std::nullopt);
  return has_image() ? std::make_unique<CudaCopier>(device) : nullptr;
}

}  // namespace commhooks::cuda
