// Order between the streams of an accelerator.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>
#include <vector>

namespace commhooks {

// Note [Streams]
// ~~~~~~~~~~~~~~
// On an accelerator the host only enqueues work, on streams that are independent of each other. A
// gradient passes through several streams, without making the host wait:
//
//   computing, accumulating   streams of autograd, which are those of the forward
//   packing, launching        the stream of the gradient that completed the bucket
//   the hook                  its own stream; collectives run on streams of the backend
//   unpacking                 the stream that was current where backward() was called
//
//   autograd's  | grad a | grad b | pack 0 | grad c | grad d | pack 1 |
//   hook's                         \-- | reduce 0 |      \-- | reduce 1 |
//   caller's                                   \-----------------------\-- | unpack 0 | unpack 1 |
//
// If an observer is set, buckets are unpacked on one more stream while backward goes on.
//
// At each \ the right-hand stream waits for an event of the left-hand stream. Packing also waits
// for the streams of all its gradients. Autograd makes the caller's stream wait for its own
// streams, and a future makes the stream wait that is current where the future is waited for.
// Memory that is used on another stream than the one it was allocated on is recorded there, so that
// it is not reused too early.
//
// For state that a hook keeps from step to step, see Note [Streams and lifetimes] in
// runtime/side_stream.py.
//
// This covers one step. The next step comes after it, because its forward reads the parameters that
// the optimizer wrote on the caller's stream.
class StreamTrail {
 public:
  // Adds the current stream of `device`. Does nothing on the CPU.
  void add_current(c10::Device device);

  // Makes the current stream wait for all others, and keeps only the current stream. Returns
  // whether there were others.
  bool join(c10::Device device);

  void clear() {
    streams_.clear();
  }

 private:
  std::vector<c10::Stream> streams_;  // each once
};

// Returns a stream from the pool of the device; none on the CPU.
std::optional<c10::Stream> side_stream(c10::Device device);

// Prevents the memory of `tensor` from being reused before the current stream has passed this
// point.
void record_on_current_stream(const at::Tensor& tensor);

}  // namespace commhooks
