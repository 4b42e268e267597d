// 8-bit floating point: the two formats of Micikevicius et al. 2022, "FP8 formats for deep
// learning".
//
//              sign  exponent  mantissa  bias  largest
//     e4m3        1         4         3     7      448   as torch.float8_e4m3fn: no infinity
//     e5m2        1         5         2    15    57344   as torch.float8_e5m2
//
// The scale maps the largest number of the block to the largest number of the format, so overflow
// and the codes of infinity and NaN do not occur.
#pragma once

#include "codecs/block.h"

namespace commhooks::codecs {

template <int mantissa, int bias, int largest>
struct Fp8 {
  static constexpr int kBits = 8;
  static constexpr Norm norm = Norm::kLargest;

  COMMHOOKS_HD float scale(float block_largest, float /*norm*/) const {
    return block_largest / (float)largest;
  }

  // Rounds to nearest even.
  COMMHOOKS_HD u32 code(float ratio, Random /*random*/, u32 /*index*/) const {
    const u32 magnitude = magnitude_bits(ratio);
    const u32 is_odd = (magnitude >> kShift) & 1;
    const u32 normal = (magnitude - kRebias + (1u << (kShift - 1)) - 1 + is_odd) >> kShift;
    // The lowest bit of the sum is that of subnormal numbers, so the addition rounds.
    const u32 subnormal = bits_of(float_of(magnitude) + kAnchor) - bits_of(kAnchor);
    const u32 sign = (bits_of(ratio) >> 24) & 0x80u;
    return sign | select(magnitude < kSmallestNormal, subnormal, normal);
  }

  COMMHOOKS_HD float value(u32 code) const {
    const u32 magnitude = code & 0x7fu;
    const u32 normal = (magnitude << kShift) + kRebias;
    const u32 subnormal = bits_of((float)(int)magnitude * kSmallest);
    const u32 size = select(magnitude < (1u << mantissa), subnormal, normal);
    return float_of(size | ((code & 0x80u) << 24));
  }

 private:
  static constexpr int kShift = 23 - mantissa;
  static constexpr u32 kRebias = (u32)(127 - bias) << 23;
  static constexpr u32 kSmallestNormal = (u32)(128 - bias) << 23;
  static COMMHOOKS_CONSTEXPR float power_of_two(int exponent) {
    return exponent < 0 ? power_of_two(exponent + 1) / 2
                        : (exponent > 0 ? power_of_two(exponent - 1) * 2 : 1.0f);
  }
  static constexpr float kSmallest = power_of_two(1 - bias - mantissa);
  static constexpr float kAnchor = kSmallest * 0x1p23f;
};

using E4M3 = Fp8<3, 7, 448>;
using E5M2 = Fp8<2, 15, 57344>;

}  // namespace commhooks::codecs
