// Selects the elements of a gradient that a sparse hook sends, in one pass over the memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace commhooks {

// All functions first add `error` to `gradient`, if there is one. `gradient` and `error` are flat,
// contiguous, float32 or float64, on the CPU, of fewer than 2^31 elements;
// algorithms/sparse/selection.py checks that. Returns ascending int32 indices. Infinities and NaN
// count as larger than all numbers. Results do not depend on the number of threads.

// Selects exactly `count` elements with the largest magnitudes; among equal ones, the first.
at::Tensor select_largest(
    at::Tensor& gradient, const std::optional<at::Tensor>& error, int64_t count);

// Selects `count` elements of each `chunk` consecutive ones in the same way, or all of the last
// chunk if it has fewer.
at::Tensor select_largest_of_chunks(
    at::Tensor& gradient, const std::optional<at::Tensor>& error, int64_t chunk, int64_t count);

// Selects all elements with a magnitude of at least `threshold`. If it is infinity, selects all
// elements that are not finite.
at::Tensor select_above(
    at::Tensor& gradient, const std::optional<at::Tensor>& error, double threshold);

}  // namespace commhooks
