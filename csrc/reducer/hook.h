// The interface between the reducer and communication hooks.
#pragma once

#include "reducer/grad_bucket.h"

#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>
#include <string>

namespace commhooks {

// How the reducer packs gradients for a hook: multiplied by `scale` and cast to `dtype` (default:
// the dtype of the gradients), and with `checks_finite` also whether all packed numbers are finite.
// None of these costs an extra pass over the memory.
struct PackFormat {
  std::optional<c10::ScalarType> dtype;
  double scale = 1.0;
  bool checks_finite = false;
};

// The result of a hook, which may not be complete yet.
class PendingResult {
 public:
  virtual ~PendingResult() = default;

  // Completes with the result or with an error; on an accelerator, once the work is enqueued.
  virtual c10::ivalue::Future& future() = 0;

  // Returns the average, flat, with one element per element of the bucket; its dtype is that of the
  // gradients or that of the packed buffer. Rethrows an error of the hook. May only be called after
  // `future()` has completed; the current stream may then read the result. See Note [Streams].
  virtual at::Tensor result() = 0;

  // Waits until the hook no longer uses the bucket. For steps that have failed: an error of this
  // bucket, or of the device, adds nothing to the one that is being reported.
  void settle() noexcept {
    try {
      future().wait();
    } catch (const std::exception&) {
    }
  }
};

// There is always a hook; the default is AverageHook.
class Hook {
 public:
  virtual ~Hook() = default;

  // For profiles.
  virtual std::string name() const = 0;

  // Asked once, when the hook is set, as is `passes_through`.
  virtual PackFormat format() const {
    return {};
  }

  // Whether the hook leaves all gradients unchanged. Then nothing is packed, and `run` is not
  // called.
  virtual bool passes_through() const {
    return false;
  }

  // Called on the thread that runs backward, in bucket order, without the GIL and without a lock.
  // Must not wait for other ranks. The buffer has been packed on the current stream, which backward
  // goes on to use: a hook works on other streams. See Note [Streams].
  virtual std::unique_ptr<PendingResult> run(const std::shared_ptr<GradBucket>& bucket) = 0;

  // Called when a step ends early, possibly for a reason outside the hook. No more buckets of this
  // step will be launched.
  virtual void abandon() {}
};

}  // namespace commhooks
