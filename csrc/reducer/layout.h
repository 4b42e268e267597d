// The places of gradients in a flat bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace commhooks {

// Note [Bucket views]
// ~~~~~~~~~~~~~~~~~~~
// A bucket is one flat tensor: the gradients of its parameters one after the other, without
// padding. The view of a gradient has the strides of its parameter if these are dense and do not
// overlap (contiguous, channels_last, transposed, ...), and is row-major otherwise. Autograd gives
// `.grad` the same layout, so that
//   * packing and unpacking are plain copies of memory,
//   * with `gradient_as_bucket_view` the view can be used as `.grad`,
//   * element [i, j, ...] of `GradBucket::gradients()[k]` is element [i, j, ...] of the gradient,
//     in any memory format.
// Only these functions define the layout; the reducer and GradBucket both use them.
std::vector<int64_t> gradient_strides(const at::Tensor& parameter);
at::Tensor gradient_view(const at::Tensor& flat, const at::Tensor& parameter, int64_t offset);

// The part of a bucket that is the same in all steps; shared by the GradBuckets of all steps.
struct BucketLayout {
  std::vector<at::Tensor> parameters;
  std::vector<std::string> names;
  std::vector<size_t> offsets;                // in elements, into the flat buffer
  std::vector<size_t> lengths;                // in elements
  std::vector<std::vector<int64_t>> strides;  // of the gradients. See Note [Bucket views]
  std::string key;  // digest of the names: stable across processes and restarts

  // "parameters first ... last", for messages.
  std::string describe() const;
};

using Names = std::shared_ptr<const std::vector<std::string>>;

std::shared_ptr<const BucketLayout> make_bucket_layout(
    std::vector<at::Tensor> parameters, std::vector<std::string> names);

}  // namespace commhooks
