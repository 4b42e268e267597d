// Counter-based random numbers: they depend only on the seed and the index, and not on the order or
// the number of threads.
#pragma once

#include "codecs/portable.h"

namespace commhooks::codecs {

// Returns 32 random bits for each index below 2^32: a multiply-xorshift hash with the constants of
// MurmurHash3's finalizer, keyed twice so that the streams of two seeds are not shifted copies.
struct Random {
  u32 low;
  u32 high;

  COMMHOOKS_HD explicit Random(u64 seed) : low((u32)seed), high((u32)(seed >> 32)) {}

  COMMHOOKS_HD u32 bits(u32 index) const {
    u32 hash = index * 0x9e3779b1u + low;
    hash ^= hash >> 16;
    hash *= 0x85ebca6bu;
    hash ^= high;
    hash ^= hash >> 13;
    hash *= 0xc2b2ae35u;
    return hash ^ (hash >> 16);
  }

  // Returns 0 or 1. Cheaper: fair over seeds for every index, but neighbors are not independent.
  COMMHOOKS_HD u32 coin(u32 index) const {
    return (index * 0x9e3779b1u + low) >> 31;
  }

  // Returns a multiple of 2^-24, uniform in [0, 1).
  COMMHOOKS_HD float uniform(u32 index) const {
    return (float)(int)(bits(index) >> 8) * 0x1p-24f;
  }
};

// Returns the random numbers for indices from `first` on, which differ in their low 32 bits.
COMMHOOKS_HD Random random_for(u64 seed, u64 first) {
  return Random(seed + (first >> 32) * 0x9e3779b97f4a7c15u);
}

// Rounds to the bits of one of the two bfloat16 numbers beside the value, so that the expected
// number is the value. Beyond the largest finite number it rounds towards zero. Infinity and NaN
// stay.
COMMHOOKS_HD u32 stochastic_bfloat16(float value, u32 random) {
  const u32 bits = bits_of(value);
  const u32 rounded = (bits + (random >> 16)) >> 16;
  const u32 truncated = bits >> 16 | (magnitude_bits(value) > 0x7f800000u ? 0x40u : 0u);
  return select((rounded & 0x7f80u) == 0x7f80u, truncated, rounded);
}

}  // namespace commhooks::codecs
