// One packed bucket of one step, as a communication hook gets it.
#pragma once

#include "reducer/layout.h"

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <memory>
#include <string>
#include <vector>

namespace commhooks {

// Derives from torch's GradBucket so that hooks written for torch accept it. The methods of torch
// are not virtual, and its `getGradients` assumes row-major layouts, so Python gets the methods
// below.
class GradBucket : public c10d::GradBucket {
 public:
  // `index` counts the buckets that the hook gets in this step. `left_out`: parameters of buckets
  // that no hook gets in this step; null if there are none. `finite`: () bool, whether the buffer
  // is finite; undefined if that is not known.
  GradBucket(
      std::shared_ptr<const BucketLayout> layout,
      at::Tensor buffer,
      size_t index,
      bool is_last,
      int64_t step,
      Names left_out = nullptr,
      at::Tensor finite = {});

  // Returns one view of the buffer per parameter. See Note [Bucket views].
  std::vector<at::Tensor> gradients() const;

  // Returns whether the buffer is finite, as a () bool tensor on its device that the current stream
  // may read. Uses the result of packing, if packing checked it and the buffer has not been changed
  // since; otherwise makes one pass over the buffer.
  at::Tensor all_finite() const;

  const BucketLayout& layout() const {
    return *layout_;
  }
  // Number of synchronized backward passes before this one.
  int64_t step() const {
    return step_;
  }
  // Names of the parameters that no hook gets in this step.
  std::vector<std::string> left_out() const {
    return left_out_ ? *left_out_ : std::vector<std::string>();
  }

 private:
  std::shared_ptr<const BucketLayout> layout_;
  int64_t step_;
  Names left_out_;
  at::Tensor finite_;  // whether `packed_` was finite at `packed_version_`; undefined if unknown
  at::Tensor packed_;
  int64_t packed_version_ = 0;
};

}  // namespace commhooks
