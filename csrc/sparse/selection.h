// Which numbers of a gradient a sparse hook sends, found in one pass over the memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace commhooks {

// Both add `error` to `gradient` on the way, where there is one. `gradient` and `error` are flat,
// contiguous, float32 or float64, on the CPU. Returned are indices, int32 and ascending. Infinities
// and NaN count as larger than all numbers. Results do not depend on the number of threads.

// The `count` elements of the largest magnitude, and exactly that many: of equal ones the first.
at::Tensor select_largest(
    at::Tensor& gradient, const std::optional<at::Tensor>& error, int64_t count);

// All elements whose magnitude is `threshold` or more. At infinity: all that are not finite.
at::Tensor select_above(
    at::Tensor& gradient, const std::optional<at::Tensor>& error, double threshold);

}  // namespace commhooks
