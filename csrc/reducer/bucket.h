// Gradients that travel together, and the memory they travel in.
#pragma once

#include "packing/copier.h"
#include "reducer/gradient.h"
#include "reducer/hook.h"
#include "reducer/streams.h"

#include <atomic>
#include <chrono>

namespace commhooks {

// Sums over the steps since the last reset.
struct BucketStats {
  int64_t steps = 0;
  int64_t packed_bytes = 0;  // what was handed to the hook
  // Of the host's time. On an accelerator hooks only enqueue work, and complete when they have.
  double hook_seconds = 0;  // from handing over to completion
  double exposed_seconds =
      0;  // of these, what the thread that runs backward spent in or for the hook
};

// Note [Complex gradients]
// ~~~~~~~~~~~~~~~~~~~~~~~~
// Backends and hooks know real numbers only. A complex gradient travels as its real view, of shape
// [..., 2], and that is what the bucket's layout says of it; only `.grad` itself is complex.
class Bucket {
 public:
  // `indices`: of `parameters` in the reducer. `grads_are_views`: `gradient_as_bucket_view`.
  Bucket(
      std::vector<at::Tensor> parameters,
      std::vector<std::string> names,
      std::vector<size_t> indices,
      bool grads_are_views);

  // Packs the gradient at `position` as soon as it is there, or some time later, together with others:
  // many small ones are worth one pass, and a large one is worth reading while it is still in a cache.
  // Optional; CPU only.
  void pack_early(const PackFormat& format, size_t position);

  // That a gradient has arrived on the current stream. See Note [Streams].
  void add_stream() {
    streams_.add_current(device());
  }
  // Lets the current stream work on the bucket and its gradients: before `pack` and `unpack`.
  void enter_stream();

  // Gathers the gradients into one tensor in `format` and returns it. Parameters without a gradient
  // count as zeros; where the store is nowhere, the tensor is a new one. With `grads_are_views`, `.grad` of each parameter that has one becomes a view of
  // `flat()`, whose contents are undefined until `unpack`, unless the returned tensor is `flat()`.
  at::Tensor pack(const PackFormat& format);

  // Whether all that `pack` returned is finite, () bool on the device. Undefined if the format did not
  // ask, or if something lay in its place already and has not been looked at.
  at::Tensor finite() const {
    return packs_all_ ? finite_ : at::Tensor();
  }

  // Forgets what was packed early, and reads gradients from `store` from now on.
  void begin_step(std::shared_ptr<const GradientStore> store);
  void set_store(std::shared_ptr<const GradientStore> store) {
    store_ = std::move(store);
  }

  // Throws unless `result` is what a hook may return for this bucket.
  void check_result(const at::Tensor& result, const PackFormat& format) const;

  // Writes `result` (flat, any floating dtype) into the gradients at `positions`; parameters there get
  // one if they have none.
  void unpack(const at::Tensor& result, const std::vector<size_t>& positions);

  // Gives the memory back, unless gradients are views of it.
  void release();

  // Of the gradients as they travel.
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
  size_t lane = 0;         // index of the hook that averages it
  bool is_sparse = false;  // its only gradient is, so `pack` returns a sparse tensor

  // --- of the current step ---
  size_t missing = 0;    // gradients that have not arrived yet
  bool skipped = false;  // no rank uses any of its parameters
  std::unique_ptr<PendingResult> pending;
  std::chrono::steady_clock::time_point handed_over;
  // When the hook completed, in `handed_over`'s clock; zero until the callback that sets it has run.
  std::shared_ptr<std::atomic<std::chrono::steady_clock::duration>> completed;

  BucketStats stats;

 private:
  // The view of `flat` through which the gradient at `position` is seen, as it travels.
  at::Tensor view(const at::Tensor& flat, size_t position) const;
  // The tensor that gradients are packed into.
  const at::Tensor& packed(const PackFormat& format);
  void gather(const PackFormat& format, size_t position);
  void flush(const PackFormat& format);
  at::Tensor pack_sparse(const PackFormat& format) const;
  at::Tensor zeros(const PackFormat& format) const;
  at::Tensor no_rows(const at::Tensor& parameter) const;
  at::Tensor new_gradient(size_t position);
  const at::Tensor& flat();
  // Whether the memory of `grad` is the place in `flat_` that is reserved for it.
  bool is_own_view(const at::Tensor& grad, size_t position) const;
  // Whether moving `grad` is moving consecutive numbers, which the copier can.
  bool is_plain(const at::Tensor& grad, size_t position) const;
  // Whether the bucket is too large to stay in a cache.
  bool leaves_cache() const;
  void check_gradient(const at::Tensor& grad, size_t position) const;

  std::vector<at::Tensor> parameters_;
  std::shared_ptr<const BucketLayout> layout_;
  std::vector<size_t> indices_;
  bool grads_are_views_;
  int64_t numel_;
  std::unique_ptr<Copier> copier_;
  std::shared_ptr<const GradientStore> store_ = local_gradients();
  at::Tensor flat_;                // in the gradients' dtype; made when first needed
  std::vector<at::Tensor> views_;  // of flat_, to serve as `.grad`
  at::Tensor wire_;                // in the dtype that a hook asked for; made when first needed

  std::vector<char> gathered_;  // per position, in this step
  std::vector<Piece> pieces_;   // gathered, but not copied yet
  int64_t pieces_numel_ = 0;
  std::vector<at::Tensor> sources_;  // what is not pieces: all together, too
  std::vector<at::Tensor> destinations_;
  bool packs_all_ = true;         // nothing was in its place already
  at::Tensor finite_;             // of what has been packed
  std::vector<at::Tensor> kept_;  // gradients that `pieces_` point to and nobody else may keep
  StreamTrail streams_;           // that have worked on the bucket or its gradients in this step
};

}  // namespace commhooks
