// Access to a parameter's gradient in autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace torch::distributed::autograd {
class DistAutogradContext;
}

namespace commhooks {

// Either `.grad`; or the torch.distributed.autograd context, if backward runs inside one; or
// nothing, on a rank that takes part in a step with zeros.
class GradientStore {
 public:
  // The store that is `.grad`.
  GradientStore() = default;
  // Returns the store of the backward that this thread runs.
  static GradientStore current();
  // Returns the store that has no gradients and stores none; `.grad` is neither read nor written.
  static GradientStore nowhere();

  // Returns an undefined tensor if the parameter has no gradient.
  at::Tensor get(const at::Tensor& parameter) const;
  // Returns whether the parameter has a gradient, without owning it for a moment: it may be called
  // under a lock.
  bool has(const at::Tensor& parameter) const;
  void set(const at::Tensor& parameter, at::Tensor gradient) const;
  // Whether averages need not be written.
  bool is_nowhere() const {
    return is_nowhere_;
  }
  bool operator==(const GradientStore&) const = default;

 private:
  std::shared_ptr<torch::distributed::autograd::DistAutogradContext> context_;  // null: none
  bool is_nowhere_ = false;
};

}  // namespace commhooks
