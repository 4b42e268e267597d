// Floating point numbers of at most 8 bits: a sign, an exponent and a mantissa, with subnormal
// numbers and without infinity and NaN, which encoders do not produce. E4M3 and E5M2 are those of
// Micikevicius et al. 2022, "FP8 formats for deep learning".
#pragma once

#include "codecs/portable.h"

namespace commhooks::codecs {

template <int bits, int mantissa, int bias, int largest>
struct SmallFloat {
  static constexpr int kBits = bits;
  static constexpr float kLargest = largest;

  // Rounds to nearest even. The magnitude must not round to more than the largest number.
  static COMMHOOKS_HD u32 encode(float number) {
    const u32 magnitude = magnitude_bits(number);
    const u32 is_odd = (magnitude >> kShift) & 1;
    const u32 normal = (magnitude - kRebias + (1u << (kShift - 1)) - 1 + is_odd) >> kShift;
    // The lowest bit of the sum is that of subnormal numbers, so the addition rounds.
    const u32 subnormal = bits_of(float_of(magnitude) + kAnchor) - bits_of(kAnchor);
    const u32 sign = (bits_of(number) >> (32 - bits)) & kSign;
    return sign | select(magnitude < kSmallestNormal, subnormal, normal);
  }

  static COMMHOOKS_HD float decode(u32 code) {
    const u32 magnitude = code & (kSign - 1);
    const u32 normal = (magnitude << kShift) + kRebias;
    const u32 subnormal = bits_of((float)(int)magnitude * kSmallest);
    const u32 size = select(magnitude < (1u << mantissa), subnormal, normal);
    return float_of(size | ((code & kSign) << (32 - bits)));
  }

 private:
  static constexpr u32 kSign = 1u << (bits - 1);
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

}  // namespace commhooks::codecs
