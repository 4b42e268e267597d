// The arithmetic of sparse gradients.
#pragma once

#include "codecs/portable.h"

namespace commhooks::codecs {

// As for floats: the bits of |value|, in the order of the numbers, infinity and then NaN last.
COMMHOOKS_HD u64 magnitude_bits(double value) {
#ifdef __CUDA_ARCH__
  const u64 bits = __double_as_longlong(value);
#else
  u64 bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
#endif
  return bits & 0x7fffffffffffffffull;
}

// How ascending indices are written; see Note [Index code] in commhooks/algorithms/index_code.py.
struct IndexCode {
  int low_bits;
  bool adds_rank;

  // Which bit of the bitmap stands for the index that `rank` smaller ones precede.
  COMMHOOKS_HD u64 position(u64 index, u64 rank) const {
    return (index >> low_bits) + (adds_rank ? rank : 0);
  }

  COMMHOOKS_HD u64 low(u64 index) const {
    return index & ((1ull << low_bits) - 1);
  }

  COMMHOOKS_HD u64 index(u64 position, u64 rank, u64 low) const {
    return (position - (adds_rank ? rank : 0)) << low_bits | low;
  }
};

}  // namespace commhooks::codecs
