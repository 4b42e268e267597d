#include "reducer/grad_bucket.h"

#include "reducer/streams.h"
#include "shared/finite.h"

#include <optional>

namespace commhooks {
namespace {

std::vector<c10::IntArrayRef> sizes_of(const std::vector<at::Tensor>& parameters) {
  std::vector<c10::IntArrayRef> sizes;
  sizes.reserve(parameters.size());
  for (const auto& parameter : parameters) {
    sizes.push_back(parameter.sizes());
  }
  return sizes;
}

}  // namespace

GradBucket::GradBucket(
    std::shared_ptr<const BucketLayout> layout,
    at::Tensor buffer,
    size_t index,
    bool is_last,
    int64_t step,
    Names left_out,
    at::Tensor finite)
    : c10d::GradBucket(
          index,
          is_last ? index + 1 : index + 2,  // a number of buckets, which only tells `isLast`
          std::move(buffer),
          layout->offsets,
          layout->lengths,
          sizes_of(layout->parameters),
          layout->parameters,
          std::nullopt),
      layout_(std::move(layout)),
      step_(step),
      left_out_(std::move(left_out)),
      finite_(std::move(finite)) {
  if (finite_.defined()) {
    packed_ = getBuffer();
    packed_version_ = packed_._version();
  }
}

at::Tensor GradBucket::all_finite() const {
  const at::Tensor& buffer = getBuffer();
  if (!finite_.defined() || !buffer.is_same(packed_) || buffer._version() != packed_version_) {
    return commhooks::all_finite(buffer);
  }
  record_on_current_stream(finite_);
  return finite_;
}

std::vector<at::Tensor> GradBucket::gradients() const {
  std::vector<at::Tensor> views;
  views.reserve(layout_->parameters.size());
  for (size_t i = 0; i < layout_->parameters.size(); ++i) {
    views.push_back(gradient_view(
        getBuffer(), layout_->parameters[i], static_cast<int64_t>(layout_->offsets[i])));
  }
  return views;
}

}  // namespace commhooks
