// Where a gradient lies inside a flat bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace commhooks {

// Note [Bucket views]
// ~~~~~~~~~~~~~~~~~~~
// A bucket is one flat tensor: the gradients of its parameters one after the other, without padding.
// The gradient of a parameter is seen through the parameter's own strides when these are dense and do
// not overlap (contiguous, channels_last, transposed ...), and row-major otherwise. Autograd gives
// `.grad` the same layout, so that
//   * packing and unpacking are plain copies of memory,
//   * with `gradient_as_bucket_view` the view itself can serve as `.grad`,
//   * element [i, j, ...] of `GradBucket::gradients()[k]` is element [i, j, ...] of the gradient,
//     whatever its memory format.
// These functions are the only place that decides the layout; the reducer and GradBucket both use them.
std::vector<int64_t> gradient_strides(const at::Tensor& parameter);
at::Tensor gradient_view(const at::Tensor& flat, const at::Tensor& parameter, int64_t offset);

}  // namespace commhooks
