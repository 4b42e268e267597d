// What the reducer asks of a communication hook.
#pragma once

#include "reducer/layout.h"

#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>
#include <string>

namespace commhooks {

// How the reducer packs gradients for a hook: cast to `dtype` (default: the gradients' own), times
// `scale`; and whether it finds out on the way if all packed numbers are finite. None costs anything:
// packing passes over the memory anyway.
struct PackFormat {
  std::optional<c10::ScalarType> dtype;
  double scale = 1.0;
  bool checks_finite = false;
};

// One bucket of one step, packed. `index` and `bucket_count` are those of the buckets that this hook
// gets in this step.
struct BucketCall {
  std::shared_ptr<const BucketLayout> layout;
  at::Tensor buffer;
  size_t index;
  size_t bucket_count;
  int64_t step;
  Names left_out;     // parameters of buckets that no hook gets in this step; null: there are none
  at::Tensor finite;  // () bool: whether all of the buffer is; undefined where that is not known
};

// A hook's answer that is on its way.
class PendingResult {
 public:
  virtual ~PendingResult() = default;

  // Completes when the result is there, or an error; on an accelerator, when its work is enqueued.
  virtual c10::ivalue::Future& future() = 0;

  // The average, flat, with one element per element of the bucket; its dtype may be that of the
  // gradients or of the packed buffer. Throws what the hook threw. Only after `future()` has been waited
  // for; then the current stream may read it. See Note [Streams].
  virtual at::Tensor result() = 0;
};

// There is always a hook; the default one averages.
class Hook {
 public:
  virtual ~Hook() = default;

  // For profiles.
  virtual std::string name() const = 0;

  virtual PackFormat format() const {
    return {};
  }

  // Whether the gradients come out as they go in. Nothing is packed then, and `run` not called.
  virtual bool passes_through() const {
    return false;
  }

  // Called on the thread that runs backward, in bucket order, without the GIL and without any lock of
  // the reducer that autograd needs. Must not wait for other ranks. The buffer has been packed on the
  // current stream, which goes on with backward: a hook leaves it free. See Note [Streams].
  virtual std::unique_ptr<PendingResult> run(const BucketCall& call) = 0;

  // The step ended early, for a reason that may lie outside the hook; buckets that are on their way
  // have been handed out, others of this step will not come.
  virtual void abandon() {}
};

}  // namespace commhooks
