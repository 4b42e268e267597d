// Evenly spaced levels: integers from -levels to levels, times the scale.
//
// With the largest number as the norm, this is block-wise integer quantization. With the Euclidean
// norm and stochastic rounding it is QSGD (Alistarh et al. 2017, section 3.1), and with one level
// TernGrad (Wen et al. 2017, section 3.1).
//
// With the norm kSigned, the lowest level is -levels - 1, so that all codes are used. The scale has
// a sign, which makes the number of the largest magnitude exactly this level. Numbers of the other
// sign are clamped to `levels`.
#pragma once

#include "codecs/block.h"

namespace commhooks::codecs {

template <int bits, bool stochastic>
struct Levels {
  static constexpr int kBits = bits;
  static constexpr int kGroup = 0;

  Norm norm;     // kLargest, kSigned, kEuclidean, or kRootMean to clip
  float levels;  // at most 2^(bits - 1) - 1
  float clip;    // the bound for clamping, in root mean squares of the block

  COMMHOOKS_HD float scale(float largest, float size) const {
    // One division for all norms, so that the loop over blocks is vectorized.
    const bool is_clipped = norm == Norm::kRootMean && size * clip < largest;
    const bool is_norm = norm == Norm::kEuclidean || norm == Norm::kSigned;
    const float top = is_norm ? size : (is_clipped ? size * clip : largest);
    return top / (norm == Norm::kSigned ? lowest() : levels);
  }

  COMMHOOKS_HD u32 code(float ratio, Random random, u32 index) const {
    const float wanted = clamp(ratio, lowest(), levels);
    const float shifted = wanted + kRounder;
    if constexpr (!stochastic) {
      return bits_of(shifted) & kMask;
    } else {
      // Take the level below, or the next one with the probability that makes the mean exact.
      const float nearest = shifted - kRounder;
      const u32 is_above = nearest > wanted ? 1 : 0;
      const float below = nearest - (float)(int)is_above;
      const u32 is_up = random.uniform(index) < wanted - below ? 1 : 0;
      return (bits_of(shifted) - is_above + is_up) & kMask;
    }
  }

  COMMHOOKS_HD float value(u32 code) const {
    return (float)((int)(code ^ kSign) - (int)kSign);
  }

 private:
  COMMHOOKS_HD float lowest() const {
    return norm == Norm::kSigned ? -1.0f - levels : -levels;
  }

  static constexpr u32 kMask = (1u << bits) - 1;
  static constexpr u32 kSign = 1u << (bits - 1);
};

}  // namespace commhooks::codecs
