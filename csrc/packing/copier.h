// Copies gradients into buckets and back, on one type of device.
#pragma once

#include "packing/piece.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace commhooks {

// Never waits for a device: on an accelerator, copies are enqueued on the current stream.
class Copier {
 public:
  explicit Copier(c10::Device device);

  // Whether `copy_pieces` is supported: on the CPU, and on CUDA devices for which the kernels in
  // cuda/ were compiled. Otherwise use `copy_tensors` for everything.
  bool copies_pieces() const {
    return copies_pieces_;
  }

  // destination = cast<to>(scale * source) for every piece, in one pass. `leaves_cache`:
  // destinations are parts of memory that is larger than the caches of a CPU. `finite`: undefined,
  // or a () bool tensor on the device that is set to false if a written number is not finite.
  void copy_pieces(
      const std::vector<Piece>& pieces,
      c10::ScalarType from,
      c10::ScalarType to,
      double scale,
      bool leaves_cache,
      const at::Tensor& finite) const;

 private:
  c10::Device device_;
  bool copies_pieces_;
};

// The same for pairs of tensors of equal shapes and any strides, by ATen's foreach operations.
void copy_tensors(
    const std::vector<at::Tensor>& sources,
    const std::vector<at::Tensor>& destinations,
    double scale,
    const at::Tensor& finite);

}  // namespace commhooks
