// The interface between the reducer and communication hooks, and the other ways to average.
#pragma once

#include "reducer/grad_bucket.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

namespace commhooks {

// The form in which a hook gets gradients: multiplied by `scale` and cast to `dtype` (default: the
// dtype of the gradients). With `checks_finite` the reducer also finds out whether all are finite.
// None of these costs an extra pass over the memory. `keeps_views`: gradients that are views of the
// bucket are not cast, because the hook does that.
struct PackFormat {
  std::optional<c10::ScalarType> dtype;
  double scale = 1.0;
  bool checks_finite = false;
  bool keeps_views = false;
};

// The result of a hook, which may not be complete yet. It completes with the average or with an
// error; on an accelerator, once the work is enqueued. The hook then no longer uses the bucket.
class PendingResult {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~PendingResult() = default;

  // Does not wait.
  virtual bool is_complete() = 0;

  // Waits until it is complete.
  virtual void wait() noexcept = 0;

  // When it was completed; zero if that is not known yet.
  virtual Clock::time_point completed() const = 0;

  // Returns the average, flat, with one element per element of the bucket; its dtype is that of the
  // gradients or that of the packed buffer. Rethrows the error of the hook. May only be called once
  // it is complete; the current stream may then read the result. See Note [Streams].
  virtual at::Tensor result() = 0;
};

// One that completes with a future, or is complete from the start if that is null.
class FutureResult : public PendingResult {
 public:
  explicit FutureResult(c10::intrusive_ptr<c10::ivalue::Future> future)
      : future_(std::move(future)),
        completed_(
            std::make_shared<std::atomic<Clock::duration>>(
                future_ ? Clock::duration::zero() : Clock::now().time_since_epoch())) {
    if (future_) {
      future_->addCallback(
          [completed = completed_](c10::ivalue::Future&) {
            *completed = Clock::now().time_since_epoch();
          },
          /*uses_future=*/false);  // otherwise it runs on a stream that waits for the hook's
    }
  }

  bool is_complete() override {
    return !future_ || future_->completed();
  }
  // An error of the device is not one of this bucket; `result` rethrows those.
  void wait() noexcept override {
    try {
      if (future_) {
        future_->wait();
      }
    } catch (const std::exception&) {
    }
  }
  Clock::time_point completed() const override {
    return Clock::time_point(completed_->load());
  }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::shared_ptr<std::atomic<Clock::duration>> completed_;
};

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
  // Must not wait for other ranks to reach this bucket. The buffer has been packed on the current
  // stream, which backward goes on to use: a hook works on other streams. See Note [Streams].
  virtual std::unique_ptr<PendingResult> run(const std::shared_ptr<GradBucket>& bucket) = 0;

  // Offers a faster way to average over `process_group`, whose memory the buckets are in; null if
  // there is none. Called when the hook is set.
  virtual void use_transport(
      const c10::intrusive_ptr<c10d::ProcessGroup>& /*process_group*/, TransportPtr /*transport*/) {
  }

  // Whether a step that fails on one rank fails on all, even if none of its buckets has run there.
  virtual bool fails_everywhere() const {
    return false;
  }

  // Called when the step is aborted, possibly for a reason outside the hook. No more buckets of it
  // will be launched. `has_run`: whether one has been.
  virtual void abort(bool /*has_run*/) {}
};

}  // namespace commhooks
