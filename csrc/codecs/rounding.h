// Stochastic rounding.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace commhooks {

// Sets `out`, bfloat16, to scale * values, float32, rounded at random to one of the two neighbors.
// Random numbers depend on the seed and the position. Both are flat, contiguous and on the CPU.
void round_stochastically(
    const at::Tensor& values, double scale, const at::Tensor& out, uint64_t seed);

}  // namespace commhooks
