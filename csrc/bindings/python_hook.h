// Hooks written in Python. The GIL is taken here and nowhere else in the reducer.
#pragma once

#include "reducer/hook.h"

#include <torch/csrc/utils/pybind.h>

namespace commhooks {

// Calls `function(bucket)`, which returns a torch.futures.Future that will hold one tensor.
// If `function` has an attribute `abandon`, it is called when a step ends early.
class PythonHook final : public Hook {
 public:
  explicit PythonHook(pybind11::object function);
  ~PythonHook() override;

  std::unique_ptr<PendingResult> run(const BucketCall& call) override;
  void abandon() override;

 private:
  pybind11::object function_;
};

}  // namespace commhooks
