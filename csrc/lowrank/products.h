// The matrix products of low-rank compression, each in one pass over the memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace commhooks {

// All tensors are float32 on the CPU. M = error + gradient (gradient alone if there is no error) is
// never stored.
//
//   error     (k, n, m)  contiguous, or none
//   gradient  (k, n, m)  strides (any, m, 1): matrices in a bucket
//   left      (k, n, r)  contiguous
//   right     (k, r, m)  contiguous
//
// Results do not depend on the number of threads: every element is summed in one fixed order.

// left = M * right^T
void project_left(
    const std::optional<at::Tensor>& error,
    const at::Tensor& gradient,
    const at::Tensor& right,
    at::Tensor& left);

// right = left^T * M
void project_right(
    const std::optional<at::Tensor>& error,
    const at::Tensor& gradient,
    const at::Tensor& left,
    at::Tensor& right);

// error = M - own_left * own_right; gradient = mean_left * mean_right
void apply_factors(
    std::optional<at::Tensor> error,
    at::Tensor& gradient,
    const at::Tensor& own_left,
    const at::Tensor& own_right,
    const at::Tensor& mean_left,
    const at::Tensor& mean_right);

}  // namespace commhooks
