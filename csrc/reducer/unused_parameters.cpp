#include "reducer/unused_parameters.h"

#include <algorithm>

namespace commhooks {

void UnusedParameters::keep(
    const Bucket& bucket, const std::vector<at::Tensor>& parameters, const GradientStore& store) {
  for (const size_t index : bucket.indices()) {
    if (!may_include(index)) {
      continue;
    }
    if (const at::Tensor grad = store.get(parameters[index]); grad.defined()) {
      kept_.emplace_back(index, grad.detach().clone());
    }
  }
}

void UnusedParameters::defer(Bucket& bucket, at::Tensor average) {
  deferred_.emplace_back(&bucket, std::move(average));
}

std::vector<UnusedParameters::Deferred> UnusedParameters::settle(
    const Usage::Everywhere& everywhere) {
  std::vector<Deferred> settled;
  for (auto& [bucket, average] : std::exchange(deferred_, {})) {
    Deferred deferred{bucket, std::move(average), {}};
    for (size_t position = 0; position < bucket->indices().size(); ++position) {
      const size_t index = bucket->indices()[position];
      if (!usage_.here(index) && everywhere.used(index)) {
        deferred.positions.push_back(position);
      }
    }
    settled.push_back(std::move(deferred));
  }
  const auto used_elsewhere = [&](const auto& kept) { return everywhere.used(kept.first); };
  kept_.erase(std::remove_if(kept_.begin(), kept_.end(), used_elsewhere), kept_.end());
  return settled;
}

void UnusedParameters::remember(const Usage::Everywhere& everywhere) {
  always_unused_.resize(everywhere.size());
  for (size_t index = 0; index < everywhere.size(); ++index) {
    always_unused_[index] = !everywhere.used(index);
  }
}

void UnusedParameters::restore(
    const std::vector<at::Tensor>& parameters, const GradientStore& store) {
  for (const auto& [index, kept] : kept_) {
    record_on_current_stream(kept);
    store.get(parameters[index]).detach().copy_(kept);
  }
}

void UnusedParameters::forget() {
  kept_.clear();
  deferred_.clear();
}

}  // namespace commhooks
