// What a communication hook sees of a bucket.
#pragma once

#include "reducer/layout.h"

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <memory>
#include <string>
#include <vector>

namespace commhooks {

// Derives from torch's GradBucket so that hooks written for torch accept it; torch's methods are not
// virtual, and its `getGradients` assumes row-major layouts, so Python sees the methods below instead.
class GradBucket : public c10d::GradBucket {
 public:
  GradBucket(
      std::shared_ptr<const BucketLayout> layout,
      at::Tensor buffer,
      size_t index,
      size_t bucket_count,
      int64_t step,
      Names left_out = nullptr,
      at::Tensor finite = {});

  // One view of the buffer per parameter. See Note [Bucket views].
  std::vector<at::Tensor> gradients() const;

  // () bool on the buffer's device, which the current stream may read. What packing found out if it was
  // asked to and nobody has changed the buffer since, else by one pass over the buffer.
  at::Tensor all_finite() const;

  const BucketLayout& layout() const {
    return *layout_;
  }
  // Number of synchronized backward passes that came before this one.
  int64_t step() const {
    return step_;
  }
  // Parameters that no hook gets in this step.
  std::vector<std::string> left_out() const {
    return left_out_ ? *left_out_ : std::vector<std::string>();
  }

 private:
  std::shared_ptr<const BucketLayout> layout_;
  int64_t step_;
  Names left_out_;
  at::Tensor finite_;  // of `packed_` as it was; undefined where that is not known
  at::Tensor packed_;
  int64_t packed_version_ = 0;
};

}  // namespace commhooks
