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
      Names left_out = nullptr);

  // One view of the buffer per parameter. See Note [Bucket views].
  std::vector<at::Tensor> gradients() const;

  const BucketLayout& layout() const {
    return *layout_;
  }
  // Number of synchronised backward passes that came before this one.
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
};

}  // namespace commhooks
