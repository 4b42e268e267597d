// Order between the streams of an accelerator.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>
#include <vector>

namespace commhooks {

// Note [Streams]
// ~~~~~~~~~~~~~~
// On an accelerator the host only enqueues work, on streams that know nothing of each other. A
// gradient's way touches several, and nothing on it makes the host wait:
//
//   computing, accumulating   streams of autograd: those of the forward
//   packing, launching        that of the gradient which completed the bucket
//   the hook                  a stream of its own; collectives: those of the backend
//   unpacking                 that which is current where backward() was called
//
//       autograd's  | grad a | grad b | pack 0 | grad c | grad d | pack 1 |
//       hook's                         \-- | reduce 0 |      \-- | reduce 1 |
//       caller's                                   \-----------------------\-- | unpack 0 | unpack 1 |
//
// Where an observer waits for averages, buckets are unpacked while backward goes on, on one more stream.
//
// At each \ the right-hand stream waits for an event of the left-hand one. Packing waits likewise for
// the streams of all its gradients. Autograd itself makes the caller's stream wait for its own, and a
// future makes whoever waits for it. Memory that is read or written on another stream than the one it
// was allocated on is recorded there, so that it is not handed out again too early.
//
// All this holds of one step. The next one begins behind it, as its forward reads what the optimizer
// wrote on the caller's stream.
class StreamTrail {
 public:
  // That the current stream of `device` has worked on something. Nothing on the CPU.
  void add_current(c10::Device device);

  // Makes the current stream wait for the others, whose place it takes. Whether there were any.
  bool join(c10::Device device);

  void clear() {
    streams_.clear();
  }

 private:
  std::vector<c10::Stream> streams_;  // each once
};

// A stream besides those that the current thread uses; nothing on the CPU.
std::optional<c10::Stream> side_stream(c10::Device device);

// Keeps the memory of `tensor`, once it is freed, until the current stream has passed this point.
void record_on_current_stream(const at::Tensor& tensor);

}  // namespace commhooks
