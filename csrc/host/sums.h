// Sums over ranks, in the order of ranks.
#pragma once

#include <c10/core/ScalarType.h>

#include <vector>

namespace commhooks {

// destination[i] = ((sources[0][i] + sources[1][i]) + sources[2][i] + ...) * scale for `numel`
// elements, in fp64 for fp64 and in fp32 for fp32, fp16 and bf16, rounded to the dtype at the end;
// packing takes no other dtypes.
// The destination may be one of the sources. Runs on ATen's threads.
void sum(
    const std::vector<const void*>& sources,
    void* destination,
    int64_t numel,
    c10::ScalarType dtype,
    double scale = 1.0);

}  // namespace commhooks
