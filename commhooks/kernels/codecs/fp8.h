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

#include "codecs/small_float.h"

namespace commhooks::codecs {

template <typename Format>
struct Fp8 {
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

using E4M3 = Fp8<E4M3Format>;
using E5M2 = Fp8<E5M2Format>;

}  // namespace commhooks::codecs
