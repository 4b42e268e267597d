#include "reducer/grad_bucket.h"

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
    size_t bucket_count,
    int64_t step,
    Names left_out)
    : c10d::GradBucket(
          index,
          bucket_count,
          std::move(buffer),
          layout->offsets,
          layout->lengths,
          sizes_of(layout->parameters),
          layout->parameters,
          std::nullopt),
      layout_(std::move(layout)),
      step_(step),
      left_out_(std::move(left_out)) {}

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
