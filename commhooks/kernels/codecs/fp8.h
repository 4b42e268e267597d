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

template <int mantissa, int bias, int largest>
struct Fp8 {
  static constexpr int kBits = 8;
  static constexpr int kGroup = 0;
  static constexpr Norm norm = Norm::kLargest;
  using Format = SmallFloat<8, mantissa, bias>;

  COMMHOOKS_HD float scale(float block_largest, float /*norm*/) const {
    return block_largest / (float)largest;
  }

  COMMHOOKS_HD u32 code(float ratio, Random /*random*/, u32 /*index*/) const {
    return Format::encode(ratio);
  }

  COMMHOOKS_HD float value(u32 code) const {
    return Format::decode(code);
  }
};

using E4M3 = Fp8<3, 7, 448>;
using E5M2 = Fp8<2, 15, 57344>;

}  // namespace commhooks::codecs
