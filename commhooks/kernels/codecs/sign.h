// One bit per number: its sign, times a mean magnitude of the block.
//
// With the mean of |x|, the decoded block is as close to the block as signs times a scale can be
// (Karimireddy et al. 2019, section 4). With the root mean square it has the norm of the block
// (Tang et al. 2021, 1-bit Adam, section 3).
#pragma once

#include "codecs/block.h"

namespace commhooks::codecs {

struct Sign {
  static constexpr int kBits = 1;
  static constexpr int kGroup = 0;

  Norm norm;  // kMean or kRootMean

  COMMHOOKS_HD float scale(float /*largest*/, float size) const {
    return size;
  }

  // Returns 1 for negative numbers. Zeros get random signs; a fixed sign would add up over steps.
  COMMHOOKS_HD u32 code(float ratio, Random random, u32 index) const {
    return select(magnitude_bits(ratio) == 0, random.coin(index) << 31, bits_of(ratio)) >> 31;
  }

  COMMHOOKS_HD float value(u32 code) const {
    return 1.0f - 2.0f * (float)(int)code;
  }
};

}  // namespace commhooks::codecs
