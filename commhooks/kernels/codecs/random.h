// Random numbers by counter: the same for the same seed and index, in whatever order or number of
// threads they are asked for.
#pragma once

#include "codecs/portable.h"

namespace commhooks::codecs {

// 32 random bits for each index below 2^32. A multiply-xorshift hash with the constants of
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

  // 0 or 1. Cheaper: over seeds it is fair for every index, but neighbors are not independent.
  COMMHOOKS_HD u32 coin(u32 index) const {
    return (index * 0x9e3779b1u + low) >> 31;
  }

  // Uniform in [0, 1), a multiple of 2^-24.
  COMMHOOKS_HD float uniform(u32 index) const {
    return (float)(int)(bits(index) >> 8) * 0x1p-24f;
  }
};

// For numbers from `first` on, of which the low 32 bits of the index tell one from another.
COMMHOOKS_HD Random random_for(u64 seed, u64 first) {
  return Random(seed + (first >> 32) * 0x9e3779b97f4a7c15u);
}

}  // namespace commhooks::codecs
