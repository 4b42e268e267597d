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

  // How many ranks it connects.
  virtual int size() const = 0;

  // Returns uninitialized memory, flat, that `average` need not copy. With `in_place` the average
  // is written there; the caller may then overwrite it as soon as it is complete.
  virtual at::Tensor allocate(int64_t numel, c10::ScalarType dtype, bool in_place) = 0;

  // Starts to compute the sum over ranks of `tensor`, whose numbers have been divided already.
  // Every rank makes the same calls, in the same order. The tensor must not be changed before the
  // result is complete nor, unless it is `in_place`, before `end_step`. `bucket`: its index, which
  // has to be the same on all ranks. A wait for other ranks fails after `timeout`.
  virtual std::unique_ptr<PendingResult> average(
      const at::Tensor& tensor, size_t bucket, std::chrono::milliseconds timeout) = 0;

  // Waits until no rank reads memory of this rank any more. The caller has released all results.
  virtual void end_step(std::chrono::milliseconds timeout) = 0;
};

using TransportPtr = std::shared_ptr<Transport>;

}  // namespace commhooks
