// The most frequent conversions of gradients, with the widest instructions of the CPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace commhooks {

// destination[i] = cast(scale * source[i]) for `numel` elements; the arithmetic is fp32, rounding
// is to nearest even, NaN stays NaN. Source and destination may be the same memory in
// `scale_float`.
void scale_float(const void* source, void* destination, int64_t numel, double scale);
void scale_float_streaming(const void* source, void* destination, int64_t numel, double scale);
void float_to_bfloat16(const void* source, void* destination, int64_t numel, double scale);
void bfloat16_to_float(const void* source, void* destination, int64_t numel, double scale);
void float_to_half(const void* source, void* destination, int64_t numel, double scale);
void half_to_float(const void* source, void* destination, int64_t numel, double scale);

// Copies without loading the destination into the caches.
void stream_bytes(const void* source, void* destination, size_t bytes);

}  // namespace commhooks
