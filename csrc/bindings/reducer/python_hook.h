// Hooks written in Python, which take the GIL.
#pragma once

#include "reducer/hook.h"

#include <torch/csrc/utils/pybind.h>

namespace commhooks {

// Calls `function(bucket)`, which returns a torch.futures.Future of one tensor. If `function` has
// an attribute `abort`, `abort(has_run)` is called when a step ends early; if it has a `name`,
// profiles show it; if its `checks_finite` is true, packing checks whether gradients are finite;
// if its `fails_everywhere` is true, a step fails on all ranks or none.
class PythonHook final : public Hook {
 public:
  explicit PythonHook(pybind11::object function);

  std::string name() const override {
    return name_;
  }
  PackFormat format() const override {
    return format_;
  }
  bool fails_everywhere() const override {
    return fails_everywhere_;
  }
  std::unique_ptr<PendingResult> run(const std::shared_ptr<GradBucket>& bucket) override;
  void abort(bool has_run) override;

 private:
  std::shared_ptr<pybind11::object> function_;
  std::string name_;
  PackFormat format_;
  bool fails_everywhere_;
};

// Returns an observer that calls `function(indices)`; see BucketPipeline::Observer.
std::function<void(const std::vector<size_t>&)> python_observer(pybind11::object function);

}  // namespace commhooks
