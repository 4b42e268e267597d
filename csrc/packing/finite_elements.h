// Whether consecutive numbers in memory are finite.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace commhooks {

// Returns whether `numel` numbers are finite; fp64, fp32, fp16 or bf16. Runs on one thread.
bool all_finite(const void* numbers, int64_t numel, c10::ScalarType type);

}  // namespace commhooks
