// Numbers in half precision, handled by their bits, so that no CUDA header is needed.
#pragma once

#include "codecs/portable.h"

namespace commhooks::kernels {

using codecs::u32;

struct Half {
  unsigned short bits;
};

struct BFloat16 {
  unsigned short bits;
};

template <typename T>
__device__ inline T widen(T value) {
  return value;
}

__device__ inline float widen(Half value) {
  const u32 scaled = codecs::bits_of(codecs::float_of((value.bits & 0x7fffu) << 13) * 0x1p112f);
  const u32 exponent = value.bits & 0x7c00u;
  const u32 sign = (value.bits & 0x8000u) << 16;
  return codecs::float_of(sign | scaled | (exponent == 0x7c00u ? 0x7f800000u : 0u));
}

__device__ inline float widen(BFloat16 value) {
  return codecs::float_of((u32)value.bits << 16);
}

template <typename T>
__device__ inline void narrow(T value, T* to) {
  *to = value;
}

// Rounds to nearest, ties to even, as all casts do.
__device__ inline void narrow(float value, Half* to) {
  const u32 sign = codecs::bits_of(value) >> 16 & 0x8000u;
  const u32 magnitude = codecs::magnitude_bits(value);
  u32 bits;
  if (magnitude > 0x7f800000u) {
    bits = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // rounds to more than the largest finite number
    bits = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 rounds the last bits away
    bits = codecs::bits_of(codecs::float_of(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    bits = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  to->bits = (unsigned short)(sign | bits);
}

__device__ inline void narrow(float value, BFloat16* to) {
  const u32 bits = codecs::bits_of(value);
  const bool is_nan = codecs::magnitude_bits(value) > 0x7f800000u;
  to->bits = (unsigned short)(is_nan ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// The nearest finite number of the precision that the pointer names; NaN stays NaN.
template <typename T>
__device__ inline T clamp(T value, const T*) {
  return value;
}

__device__ inline float clamp(float value, const Half*) {
  return codecs::clamp(value, 65504.0f);
}

__device__ inline float clamp(float value, const BFloat16*) {
  return codecs::clamp(value, 0x1.fep127f);
}

}  // namespace commhooks::kernels
