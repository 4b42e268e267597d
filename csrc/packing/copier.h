// Copies gradients into buckets and back, on one type of device.
#pragma once

#include "packing/piece.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace commhooks {

// Never waits for a device: on an accelerator, copies are enqueued on the current stream.
class Copier {
 public:
  virtual ~Copier() = default;

  // Whether `copy_pieces` is supported; otherwise use `copy_tensors` for everything.
  virtual bool copies_pieces() const = 0;

  // destination = cast<to>(scale * source) for every piece, in one pass. `leaves_cache`:
  // destinations are parts of memory that is larger than the caches of a CPU. `finite`: undefined,
  // or a () bool tensor on the device that is set to false if a written number is not finite.
  virtual void copy_pieces(
      const std::vector<Piece>& pieces,
      c10::ScalarType from,
      c10::ScalarType to,
      double scale,
      bool leaves_cache,
      const at::Tensor& finite) const = 0;

  // The same for pairs of tensors of equal shapes and any strides.
  virtual void copy_tensors(
      const std::vector<at::Tensor>& sources,
      const std::vector<at::Tensor>& destinations,
      double scale,
      const at::Tensor& finite) const;
};

// On the CPU pieces are copied by `convert`; on CUDA by the kernels in cuda/, if they were compiled
// for the device; otherwise by ATen's foreach operations.
std::unique_ptr<Copier> make_copier(c10::Device device);

}  // namespace commhooks
