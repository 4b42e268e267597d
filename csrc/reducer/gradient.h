// Where autograd keeps a parameter's gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace commhooks {

// `.grad`; or, in a backward that runs inside a torch.distributed.autograd context, that context.
class GradientStore {
 public:
  virtual ~GradientStore() = default;
  // Undefined where the parameter has none.
  virtual at::Tensor get(const at::Tensor& parameter) const = 0;
  virtual void set(const at::Tensor& parameter, at::Tensor gradient) const = 0;
};

// That of the backward which this thread runs.
std::shared_ptr<const GradientStore> current_gradients();

// `.grad`.
const std::shared_ptr<const GradientStore>& local_gradients();

}  // namespace commhooks
