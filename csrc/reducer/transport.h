// A way for ranks to average that needs the memory of the buckets.
#pragma once

#include "reducer/hook.h"

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>

namespace commhooks {

// Connects all ranks of a process group, which can then average through it, or some of them.
class Transport {
 public:
  virtual ~Transport() = default;

  // For messages and logging data.
  virtual const char* name() const = 0;

  // The number of ranks that it connects.
  virtual int size() const = 0;

  // Returns uninitialized memory, flat, that `average` need not copy.
  virtual at::Tensor allocate(int64_t numel, c10::ScalarType dtype) = 0;

  // Starts to replace `tensor`, of `allocate`, by its sum over ranks; its numbers have been divided
  // already. If `wire_dtype` is a half precision, they are rounded to it before and after they are
  // summed. Every rank makes the same calls, in the same order. Nobody may write to the tensor
  // before the result is complete. `bucket`: its index, which has to be the same on all ranks. A
  // wait for other ranks fails after `timeout`.
  virtual std::unique_ptr<PendingResult> average(
      const at::Tensor& tensor,
      c10::ScalarType wire_dtype,
      size_t bucket,
      std::chrono::milliseconds timeout) = 0;
};

using TransportPtr = std::shared_ptr<Transport>;

}  // namespace commhooks
