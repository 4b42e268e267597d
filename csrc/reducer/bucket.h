// Gradients that are reduced together, and the memory they are reduced in.
#pragma once

#include "packing/copier.h"
#include "reducer/gradient.h"
#include "reducer/hook.h"
#include "reducer/streams.h"

namespace commhooks {

// Sums over the steps since the last reset.
struct BucketStats {
  int64_t steps = 0;
  int64_t packed_bytes = 0;  // handed to the hook, in its dtype
  // Time on the host. On an accelerator hooks complete once they have enqueued their work.
  double hook_seconds = 0;     // from launch to completion
  double exposed_seconds = 0;  // in the thread that runs backward, in the hook or waiting for it

  void add(const BucketStats& other) {
    steps += other.steps;
    packed_bytes += other.packed_bytes;
    hook_seconds += other.hook_seconds;
    exposed_seconds += other.exposed_seconds;
  }
};

// Tensors and `reduction` belong to the thread that has the turn, see Note [The turn]. The
// reducer's mutex guards `stats` and `progress`.
//
// Note [Complex gradients]
// ~~~~~~~~~~~~~~~~~~~~~~~~
// Backends and hooks only handle real numbers. A complex gradient is packed as its real view, whose
// shape is [..., 2], and the layout of the bucket describes this view; only `.grad` is complex.
class Bucket {
 public:
  // `indices`: the indices of `parameters` in the reducer. `grads_are_views`: the option
  // `gradient_as_bucket_view`. `transport`: whose memory to use; may be null.
  Bucket(
      std::vector<at::Tensor> parameters,
      std::vector<std::string> names,
      std::vector<size_t> indices,
      bool grads_are_views,
      TransportPtr transport);

  // Packs the gradient at `position` now, or later together with others: a large gradient is read
  // while it is still in a cache, and small ones are packed in one pass. Optional, and only if
  // `can_pack_early()`. By one thread at a time, and before `pack`.
  bool can_pack_early() const {
    return device().is_cpu() && !is_sparse;
  }
  void pack_early(const PackFormat& format, size_t position);

  // Notes that a gradient has arrived on the current stream. See Note [Streams].
  void add_stream() {
    streams_.add_current(device());
  }
  // Makes the current stream wait for the bucket and its gradients; call it before `pack` and
  // `unpack`.
  void enter_stream();

  // Packs the gradients into one tensor in `format` and returns it. Parameters without a gradient
  // count as zeros; if the store is nowhere, the tensor is a new one. With `grads_are_views`,
  // `.grad` of each parameter that has one becomes a view of `flat()`, whose contents are undefined
  // until `unpack`, unless the returned tensor is `flat()`.
  at::Tensor pack(const PackFormat& format);

  // Whether the tensor that `pack` returned is finite, as a () bool tensor on the device. Undefined
  // if the format did not ask for it, or if a gradient was already in place and has not been
  // checked.
  at::Tensor finite() const {
    return packs_all_ ? finite_ : at::Tensor();
  }

  // Owns nothing of the step before, so it may be called under a lock.
  void begin_step();
  // Reads gradients from `store` until the step ends.
  void set_store(GradientStore store) {
    store_ = std::move(store);
  }
  // Drops everything of the step but the memory of the bucket.
  void end_step();

  // Throws if a hook may not return `result` for this bucket.
  void check_result(const at::Tensor& result) const;

  // Writes `result` (flat, any floating dtype) into the gradients at `positions`; parameters there
  // get one if they have none.
  void unpack(const at::Tensor& result, const std::vector<size_t>& positions);

  // Frees the memory, unless gradients are views of it.
  void release();

  // The layout of the packed gradients.
  const BucketLayout& layout() const {
    return *layout_;
  }
  const std::shared_ptr<const BucketLayout>& shared_layout() const {
    return layout_;
  }
  // Indices of the parameters, in the order of the layout.
  const std::vector<size_t>& indices() const {
    return indices_;
  }
  int64_t numel() const {
    return numel_;
  }
  c10::ScalarType dtype() const {
    return layout_->parameters.front().scalar_type();
  }
  c10::Device device() const {
    return layout_->parameters.front().device();
  }
  int64_t bytes() const {
    return numel_ * static_cast<int64_t>(c10::elementSize(dtype()));
  }

  size_t index = 0;        // among all buckets
  size_t group = 0;        // index of its reduction group
  bool is_sparse = false;  // its only gradient is sparse, so `pack` returns a sparse tensor

  // The way to the hook and back, in the current step.
  struct Reduction {
    std::unique_ptr<PendingResult> pending;
    PendingResult::Clock::time_point handed_over;  // zero if the hook did not get it
    BucketStats stats;                             // of this step only
  };
  Reduction reduction;

  // The gradients of the current step.
  struct Progress {
    size_t missing = 0;      // have not arrived yet, or are being packed
    bool is_packed = false;  // whether a thread packs one early
    bool skipped = false;    // no rank uses any of the parameters
  };
  Progress progress;

  BucketStats stats;  // of finished steps

 private:
  // Returns the packed gradient at `position` as a view of `flat`.
  at::Tensor view(const at::Tensor& flat, size_t position) const;
  c10::ScalarType packed_dtype(const PackFormat& format) const;
  // Returns the tensor that gradients are packed into.
  const at::Tensor& packed(const PackFormat& format);
  void gather(const PackFormat& format, size_t position);
  void flush(const PackFormat& format);
  void clear_gathered();
  at::Tensor pack_sparse(const PackFormat& format) const;
  // Returns uninitialized memory for all elements.
  at::Tensor memory(c10::ScalarType dtype) const;
  const at::Tensor& flat();
  // Returns the view of `flat()` that is the gradient at `position`.
  const at::Tensor& own_view(size_t position);
  // Returns whether the memory of `grad` is its place in `flat_`.
  bool is_own_view(const at::Tensor& grad, size_t position) const;
  // Returns whether the copier can copy `grad`: whether its memory has the order of the bucket.
  bool is_plain(const at::Tensor& grad, size_t position) const;
  // Returns whether the bucket is too large to stay in a cache.
  bool leaves_cache() const;
  void check_gradient(const at::Tensor& grad, size_t position) const;

  std::vector<at::Tensor> parameters_;
  std::shared_ptr<const BucketLayout> layout_;
  std::vector<size_t> indices_;
  bool grads_are_views_;
  TransportPtr transport_;
  int64_t numel_;
  Copier copier_;
  GradientStore store_;
  at::Tensor flat_;                  // in the dtype of the gradients; allocated when first needed
  const void* flat_data_ = nullptr;  // where it was allocated
  std::vector<at::Tensor> views_;    // of flat_, one per `.grad`; see own_view()
  at::Tensor wire_;  // in the dtype that a hook asked for; allocated when first needed

  std::vector<char> gathered_;  // per position, in this step
  std::vector<Piece> pieces_;   // gathered, but not copied yet
  int64_t pieces_numel_ = 0;
  std::vector<at::Tensor> sources_;  // gradients that are not pieces, copied together as well
  std::vector<at::Tensor> destinations_;
  // Gradients to replace by views once they are copied, with their positions.
  std::vector<std::pair<size_t, at::Tensor>> replaced_;
  bool packs_all_ = true;           // no gradient was already in place
  at::Tensor finite_;               // whether the packed gradients are finite
  std::vector<c10::Storage> kept_;  // what `pieces_` point to: hooks of users may free gradients
  at::Tensor moved_;                // what `flat_` was until a user moved it
  StreamTrail streams_;             // streams that used the bucket or its gradients in this step
};

}  // namespace commhooks
