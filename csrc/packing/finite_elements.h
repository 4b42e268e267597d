// Whether numbers are finite.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace commhooks {

// Of `numel` consecutive numbers: fp64, fp32, fp16 or bf16. True if there are none. One thread.
bool all_finite(const void* numbers, int64_t numel, c10::ScalarType type);

}  // namespace commhooks
