// Where autograd keeps a parameter's gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace commhooks {

// `.grad`; or, in a backward that runs inside a torch.distributed.autograd context, that context; or,
// on a rank that takes part with zeros, nothing.
class GradientStore {
 public:
  virtual ~GradientStore() = default;
  // Undefined where the parameter has none.
  virtual at::Tensor get(const at::Tensor& parameter) const = 0;
  virtual void set(const at::Tensor& parameter, at::Tensor gradient) const = 0;
  // Whether it holds no gradients and takes none: averages need not be written.
  virtual bool is_nowhere() const {
    return false;
  }
};

// That of the backward which this thread runs.
std::shared_ptr<const GradientStore> current_gradients();

// `.grad`.
const std::shared_ptr<const GradientStore>& local_gradients();

// Zeros, whatever `.grad` holds.
const std::shared_ptr<const GradientStore>& no_gradients();

}  // namespace commhooks
