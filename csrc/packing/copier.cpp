#include "packing/copier.h"

#include "packing/convert.h"
#include "shared/finite.h"
#ifdef COMMHOOKS_WITH_CUDA
#include "packing/cuda/copier.h"
#endif

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <c10/util/Exception.h>

namespace commhooks {
namespace {

class CpuCopier final : public Copier {
 public:
  bool copies_pieces() const override {
    return true;
  }
  void copy_pieces(
      const std::vector<Piece>& pieces,
      c10::ScalarType from,
      c10::ScalarType to,
      double scale,
      bool leaves_cache,
      const at::Tensor& finite) const override {
    convert(
        pieces, from, to, scale, leaves_cache,
        finite.defined() ? finite.mutable_data_ptr<bool>() : nullptr);
  }
};

class AtenCopier final : public Copier {
 public:
  bool copies_pieces() const override {
    return false;
  }
  void copy_pieces(
      const std::vector<Piece>& pieces,
      c10::ScalarType /*from*/,
      c10::ScalarType /*to*/,
      double /*scale*/,
      bool /*leaves_cache*/,
      const at::Tensor& /*finite*/) const override {
    TORCH_INTERNAL_ASSERT(pieces.empty());
  }
};

}  // namespace

void Copier::copy_tensors(
    const std::vector<at::Tensor>& sources,
    const std::vector<at::Tensor>& destinations,
    double scale,
    const at::Tensor& finite) const {
  if (destinations.empty()) {
    return;
  }
  at::_foreach_copy_(destinations, sources);
  if (scale != 1.0) {
    at::_foreach_mul_(destinations, scale);
  }
  if (finite.defined()) {
    for (const at::Tensor& destination : destinations) {
      finite.logical_and_(all_finite(destination));
    }
  }
}

std::unique_ptr<Copier> make_copier(c10::Device device) {
  if (device.is_cpu()) {
    return std::make_unique<CpuCopier>();
  }
#ifdef COMMHOOKS_WITH_CUDA
  if (device.is_cuda()) {
    if (auto copier = cuda::make_copier(device)) {
      return copier;
    }
  }
#endif
  return std::make_unique<AtenCopier>();
}

}  // namespace commhooks
