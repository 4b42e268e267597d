// Sums over ranks, in the order of ranks.
#pragma once

#include <c10/core/ScalarType.h>

#include <vector>

namespace commhooks {

// destination[i] = ((sources[0][i] + sources[1][i]) + sources[2][i] + ...) * scale for `numel`
// elements of `dtype`: fp64, fp32, fp16 or bf16. If `wire_dtype` is fp16 or bf16, the sources are
// rounded to it, and the sum is computed in fp32 and rounded to it; otherwise the sum is computed
// in `dtype`. The destination may be one of the sources. Runs on ATen's threads.
void sum(
    const std::vector<const void*>& sources,
    void* destination,
    int64_t numel,
    c10::ScalarType dtype,
    c10::ScalarType wire_dtype,
    double scale = 1.0);

}  // namespace commhooks
