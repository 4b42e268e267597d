// Natural compression: a sign and a power of two (Horvath et al. 2019, section 2).
//
// A number is rounded to the power of two above it with the probability that makes the mean exact.
// Exponents count down from the block's largest one, in 7 bits instead of the 8 of float32.
#pragma once

#include "codecs/block.h"

namespace commhooks::codecs {

struct Natural {
  static constexpr int kBits = 8;
  static constexpr int kGroup = 0;
  static constexpr Norm norm = Norm::kLargest;

  // The power of two at or above the largest number.
  COMMHOOKS_HD float scale(float largest, float /*norm*/) const {
    return float_of((bits_of(largest) + kMantissa) & ~kMantissa);
  }

  // `ratio` is at most 1. The mantissa bits of a float are its distance from the power of two
  // below, relative to the distance between the two powers. Adding random bits to them carries into
  // the exponent with exactly that probability. The same holds for the subnormal numbers below
  // 2^-126, the smallest power.
  COMMHOOKS_HD u32 code(float ratio, Random random, u32 index) const {
    const u32 carried = magnitude_bits(ratio) + (random.bits(index) & kMantissa);
    return ((bits_of(ratio) >> 24) & 0x80u) | (carried >> 23);
  }

  COMMHOOKS_HD float value(u32 code) const {
    // The shift to the right leaves the sign, and a copy of it above the exponent.
    return float_of((u32)((int)(code << 24) >> 1) & ~0x40000000u);
  }

 private:
  static constexpr u32 kMantissa = 0x7fffffu;
};

}  // namespace commhooks::codecs
