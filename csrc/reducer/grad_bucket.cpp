#include "reducer/grad_bucket.h"

#include "reducer/layout.h"

#include <cstdio>
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

// FNV-1a, 64 bit: short, and the same on every platform.
std::string digest(const std::vector<std::string>& names) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const auto& name : names) {
    for (size_t i = 0; i <= name.size();
         ++i) {  // includes the final NUL, so that {ab, c} != {a, bc}
      hash = (hash ^ static_cast<unsigned char>(name.c_str()[i])) * 0x100000001b3ULL;
    }
  }
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

}  // namespace

std::shared_ptr<const BucketLayout> make_bucket_layout(
    std::vector<at::Tensor> parameters, std::vector<std::string> names) {
  TORCH_CHECK_VALUE(
      parameters.size() == names.size(), "A bucket needs one name per parameter; got ",
      parameters.size(), " parameters and ", names.size(), " names.");
  auto layout = std::make_shared<BucketLayout>();
  size_t offset = 0;
  for (const auto& parameter : parameters) {
    layout->offsets.push_back(offset);
    layout->lengths.push_back(static_cast<size_t>(parameter.numel()));
    layout->strides.push_back(gradient_strides(parameter));
    offset += layout->lengths.back();
  }
  layout->key = digest(names);
  layout->parameters = std::move(parameters);
  layout->names = std::move(names);
  return layout;
}

GradBucket::GradBucket(
    std::shared_ptr<const BucketLayout> layout,
    at::Tensor buffer,
    size_t index,
    size_t bucket_count,
    int64_t step)
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
      step_(step) {}

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
