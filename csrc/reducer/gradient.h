// Where autograd keeps a parameter's gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace commhooks {

// Either `.grad`; or the torch.distributed.autograd context, if backward runs inside one; or
// nothing, on a rank that takes part in a step with zeros.
class GradientStore {
 public:
  virtual ~GradientStore() = default;
  // Returns an undefined tensor if the parameter has no gradient.
  virtual at::Tensor get(const at::Tensor& parameter) const = 0;
  // Returns whether the parameter has a gradient, without owning it for a moment: it may be called
  // under a lock.
  virtual bool has(const at::Tensor& parameter) const = 0;
  virtual void set(const at::Tensor& parameter, at::Tensor gradient) const = 0;
  // Whether it has no gradients and stores none, so that averages need not be written.
  virtual bool is_nowhere() const {
    return false;
  }
};

// Returns the store of the backward that this thread runs.
std::shared_ptr<const GradientStore> current_gradients();

// Returns the store that is `.grad`.
const std::shared_ptr<const GradientStore>& local_gradients();

// Returns the store without gradients; `.grad` is neither read nor written.
const std::shared_ptr<const GradientStore>& no_gradients();

}  // namespace commhooks
