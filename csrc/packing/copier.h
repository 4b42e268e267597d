// How gradients get into buckets and back, on one kind of device.
#pragma once

#include "packing/piece.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace commhooks {

// Nothing here waits for a device: on an accelerator copies are enqueued on the current stream.
class Copier {
 public:
  virtual ~Copier() = default;

  // Whether `copy_pieces` works; else everything goes through `copy_tensors`.
  virtual bool copies_pieces() const = 0;

  // destination = cast<to>(scale * source) for every piece, in one pass. `leaves_cache`: destinations
  // are part of something larger than the caches of a CPU. `finite`: undefined, or () bool there, which
  // becomes false if a number that was written is not finite.
  virtual void copy_pieces(
      const std::vector<Piece>& pieces,
      c10::ScalarType from,
      c10::ScalarType to,
      double scale,
      bool leaves_cache,
      const at::Tensor& finite) const = 0;

  // The same for tensors of any strides, pair by pair of one shape.
  virtual void copy_tensors(
      const std::vector<at::Tensor>& sources,
      const std::vector<at::Tensor>& destinations,
      double scale,
      const at::Tensor& finite) const;
};

// For the CPU, pieces by `convert`; for CUDA, by kernels of our own where they were compiled; for
// all else ATen's foreach operations.
std::unique_ptr<Copier> make_copier(c10::Device device);

}  // namespace commhooks
