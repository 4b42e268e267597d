// Hooks written in Python, which take the GIL.
#pragma once

#include "reducer/hook.h"

#include <torch/csrc/utils/pybind.h>

namespace commhooks {

// Calls `function(bucket)`, which returns a torch.futures.Future of one tensor. If `function` has
// an attribute `abort`, it is called when a step ends early; if it has a `name`, profiles show
// it; if its `checks_finite` is true, packing checks whether gradients are finite.
class PythonHook final : public Hook {
 public:
  explicit PythonHook(pybind11::object function);

  std::string name() const override {
    return name_;
  }
  PackFormat format() const override {
    return format_;
  }
  std::unique_ptr<PendingResult> run(const std::shared_ptr<GradBucket>& bucket) override;
  void abort() override;

 private:
  std::shared_ptr<pybind11::object> function_;
  std::string name_;
  PackFormat format_;
};

// Returns an observer that calls `function(indices)`; see BucketPipeline::Observer.
std::function<void(const std::vector<size_t>&)> python_observer(pybind11::object function);

}  // namespace commhooks
