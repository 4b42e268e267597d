// Definitions that let C++ compilers, nvcc and NVRTC compile the arithmetic of codecs: it includes
// no headers, and calls nothing that only one of them knows.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define COMMHOOKS_HD __host__ __device__ __forceinline__
#define COMMHOOKS_CONSTEXPR __host__ __device__ constexpr
#else
// Always inline, so that it is compiled for the instruction set of the loop that calls it.
#define COMMHOOKS_HD inline __attribute__((always_inline))
#define COMMHOOKS_CONSTEXPR constexpr
#endif

namespace commhooks::codecs {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

COMMHOOKS_HD u32 bits_of(float value) {
  return __builtin_bit_cast(u32, value);
}

COMMHOOKS_HD float float_of(u32 bits) {
  return __builtin_bit_cast(float, bits);
}

// Returns the bits of |value|. They are ordered as the numbers, with infinity and then NaN last.
COMMHOOKS_HD u32 magnitude_bits(float value) {
  return bits_of(value) & 0x7fffffffu;
}

COMMHOOKS_HD double square_root(double value) {
#ifdef __CUDA_ARCH__
  return sqrt(value);
#else
  return __builtin_sqrt(value);
#endif
}

// Returns condition ? yes : no without a branch, which would prevent vectorization of the loop.
COMMHOOKS_HD u32 select(bool condition, u32 yes, u32 no) {
  return no ^ ((yes ^ no) & (0u - (u32)condition));
}

COMMHOOKS_HD float clamp(float value, float lowest, float highest) {
  const float above = value < lowest ? lowest : value;
  return above > highest ? highest : above;
}

COMMHOOKS_HD float clamp(float value, float limit) {
  return clamp(value, -limit, limit);
}

}  // namespace commhooks::codecs
