// Natural compression: a sign and a power of two (Horvath et al. 2019, section 2).
//
// Between two powers of two the upper one is taken with the probability that makes the mean exact.
// Exponents count from the block's largest, of which 127 are kept: 7 bits instead of the 8 of float32.
#pragma once

#include "codecs/block.h"

namespace commhooks::codecs {

struct Natural {
  static constexpr int kBits = 8;
  static constexpr Norm norm = Norm::kLargest;

  // The power of two at or above the largest number.
  COMMHOOKS_HD float scale(float largest, float /*norm*/) const {
    return float_of((bits_of(largest) + kMantissa) & ~kMantissa);
  }

  // `ratio` is at most 1. The bits of a float below its exponent are its distance from the power of
  // two below, as a share of the distance between the two powers; a random number that carries over
  // from them into the exponent does so with just that probability. The same holds for the subnormal
  // numbers below 2^-126, the smallest power.
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
