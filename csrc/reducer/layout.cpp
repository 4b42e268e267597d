#include "reducer/layout.h"

#include <ATen/ops/as_strided.h>
#include <c10/util/StringUtil.h>
#include <c10/util/strides.h>

#include <cstdio>
#include <utility>

namespace commhooks {
namespace {

// FNV-1a with 64 bits: short, and the same on every platform.
std::string digest(const std::vector<std::string>& names) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const auto& name : names) {
    // Including the final NUL, so that {ab, c} and {a, bc} differ.
    for (size_t i = 0; i <= name.size(); ++i) {
      hash = (hash ^ static_cast<unsigned char>(name.c_str()[i])) * 0x100000001b3ULL;
    }
  }
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

}  // namespace

std::vector<int64_t> gradient_strides(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) {
    return parameter.strides().vec();
  }
  const auto strides = c10::contiguous_strides(parameter.sizes());
  return {strides.begin(), strides.end()};
}

std::string BucketLayout::describe() const {
  return c10::str(
      "parameters ", names.front(),
      names.size() > 1 ? c10::str(" ... ", names.back()) : std::string());
}

std::shared_ptr<const BucketLayout> make_bucket_layout(
    std::vector<at::Tensor> parameters, std::vector<std::string> names) {
  TORCH_CHECK_VALUE(
      parameters.size() == names.size(), "Expected one name per parameter of a bucket, found ",
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

at::Tensor gradient_view(const at::Tensor& flat, const at::Tensor& parameter, int64_t offset) {
  return flat.as_strided(
      parameter.sizes(), gradient_strides(parameter), flat.storage_offset() + offset);
}

}  // namespace commhooks
