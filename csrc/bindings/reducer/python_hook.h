// Hooks written in Python. The GIL is taken here and nowhere else in the reducer.
#pragma once

#include "reducer/hook.h"

#include <torch/csrc/utils/pybind.h>

namespace commhooks {

// Calls `function(bucket)`, which returns a torch.futures.Future that will hold one tensor.
// If `function` has an attribute `abandon`, it is called when a step ends early; if it has a `name`,
// profiles show that; if its `checks_finite` is true, packing finds out whether gradients are finite.
class PythonHook final : public Hook {
 public:
  explicit PythonHook(pybind11::object function);
  ~PythonHook() override;

  std::string name() const override {
    return name_;
  }
  PackFormat format() const override {
    return format_;
  }
  std::unique_ptr<PendingResult> run(const BucketCall& call) override;
  void abandon() override;

 private:
  pybind11::object function_;
  std::string name_;
  PackFormat format_;
};

// Calls `function(indices)` as Reducer::Observer does.
std::function<void(const std::vector<size_t>&)> python_observer(pybind11::object function);

}  // namespace commhooks
