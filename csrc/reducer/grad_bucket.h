// What a communication hook sees of a bucket.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <memory>
#include <string>
#include <vector>

namespace commhooks {

// The part of a bucket that stays the same from step to step; shared by the GradBuckets of all steps.
struct BucketLayout {
  std::vector<at::Tensor> parameters;
  std::vector<std::string> names;
  std::vector<size_t> offsets;                // in elements, into the flat buffer
  std::vector<size_t> lengths;                // in elements
  std::vector<std::vector<int64_t>> strides;  // of the gradients. See Note [Bucket views]
  std::string key;  // digest of the names: stable across processes and restarts
};

std::shared_ptr<const BucketLayout> make_bucket_layout(
    std::vector<at::Tensor> parameters, std::vector<std::string> names);

// Derives from torch's GradBucket so that hooks written for torch accept it; torch's methods are not
// virtual, and its `getGradients` assumes row-major layouts, so Python sees the methods below instead.
class GradBucket : public c10d::GradBucket {
 public:
  GradBucket(
      std::shared_ptr<const BucketLayout> layout,
      at::Tensor buffer,
      size_t index,
      size_t bucket_count,
      int64_t step);

  // One view of the buffer per parameter. See Note [Bucket views].
  std::vector<at::Tensor> gradients() const;

  const BucketLayout& layout() const {
    return *layout_;
  }
  // Number of synchronised backward passes that came before this one.
  int64_t step() const {
    return step_;
  }

 private:
  std::shared_ptr<const BucketLayout> layout_;
  int64_t step_;
};

}  // namespace commhooks
