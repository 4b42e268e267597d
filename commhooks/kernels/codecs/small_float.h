// Floating point numbers of at most 8 bits: a sign, an exponent and a mantissa, with subnormal
// numbers and without infinity and NaN, which encoders do not produce.
#pragma once

#include "codecs/block.h"

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

// 8 bits: the two formats of Micikevicius et al. 2022, "FP8 formats for deep learning".
//
//              sign  exponent  mantissa  bias  largest
//     e4m3        1         4         3     7      448   as torch.float8_e4m3fn: no infinity
//     e5m2        1         5         2    15    57344   as torch.float8_e5m2
//
// 4 bits: see fp4.h.
using E2M1Format = SmallFloat<4, 1, 1, 6>;
using E3M0Format = SmallFloat<4, 0, 3, 16>;
using E4M3Format = SmallFloat<8, 3, 7, 448>;
using E5M2Format = SmallFloat<8, 2, 15, 57344>;

// Numbers of a format, times the scale of their block. The scale maps the largest number of the
// block to the largest number of the format, so overflow and the codes of infinity and NaN do not
// occur.
template <typename Format>
struct BlockFloat {
  static constexpr int kBits = Format::kBits;
  static constexpr int kGroup = 0;
  static constexpr Norm norm = Norm::kLargest;

  COMMHOOKS_HD float scale(float largest, float /*norm*/) const {
    return largest / Format::kLargest;
  }

  COMMHOOKS_HD u32 code(float ratio, Random /*random*/, u32 /*index*/) const {
    return Format::encode(ratio);
  }

  COMMHOOKS_HD float value(u32 code) const {
    return Format::decode(code);
  }
};

using E4M3 = BlockFloat<E4M3Format>;
using E5M2 = BlockFloat<E5M2Format>;

}  // namespace commhooks::codecs
