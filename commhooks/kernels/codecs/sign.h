// One bit per number: its sign, times the mean size of the block.
//
// With the mean of |x| the decoded block is the nearest one of its kind (Karimireddy et al. 2019,
// section 4); with the root mean square it is as long as what was encoded (Tang et al. 2021, 1-bit
// Adam, section 3).
#pragma once

#include "codecs/block.h"

namespace commhooks::codecs {

struct Sign {
  static constexpr int kBits = 1;

  Norm norm;  // kMean or kRootMean

  COMMHOOKS_HD float scale(float /*largest*/, float size) const {
    return size;
  }

  // 1 for negative numbers. Zeros have random signs: always the same one would add up over steps.
  COMMHOOKS_HD u32 code(float ratio, Random random, u32 index) const {
    return select(magnitude_bits(ratio) == 0, random.coin(index) << 31, bits_of(ratio)) >> 31;
  }

  COMMHOOKS_HD float value(u32 code) const {
    return 1.0f - 2.0f * (float)(int)code;
  }
};

}  // namespace commhooks::codecs
