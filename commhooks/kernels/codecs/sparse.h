// The arithmetic of sparse gradients.
#pragma once

#include "codecs/portable.h"
#include "codecs/random.h"

namespace commhooks::codecs {

// Returns the bits of |value|. They are ordered as the numbers, with infinity and then NaN last.
COMMHOOKS_HD u64 magnitude_bits(double value) {
  return __builtin_bit_cast(u64, value) & 0x7fffffffffffffffull;
}

// The code of ascending indices; see Note [Index code] in commhooks/codecs/index_code.py.
struct IndexCode {
  int low_bits;
  bool adds_ordinal;

  // Returns the bit of the bitmap for an index that `ordinal` smaller ones precede.
  COMMHOOKS_HD u64 position(u64 index, u64 ordinal) const {
    return (index >> low_bits) + (adds_ordinal ? ordinal : 0);
  }

  COMMHOOKS_HD u64 low(u64 index) const {
    return index & ((1ull << low_bits) - 1);
  }

  COMMHOOKS_HD u64 index(u64 position, u64 ordinal, u64 low) const {
    return (position - (adds_ordinal ? ordinal : 0)) << low_bits | low;
  }
};

constexpr int kWordBits = 64;

// Returns one of consecutive words, which may have any alignment. Not as a loop, because g++ only
// makes one instruction of a single expression.
COMMHOOKS_HD u64 load_word(const u8* words, u64 index) {
  const u8* const at = words + 8 * index;
  return (u64)at[0] | (u64)at[1] << 8 | (u64)at[2] << 16 | (u64)at[3] << 24 | (u64)at[4] << 32 |
      (u64)at[5] << 40 | (u64)at[6] << 48 | (u64)at[7] << 56;
}

// Returns one of consecutive fields of `width` bits.
COMMHOOKS_HD u64 read_field(const u8* words, int width, u64 index) {
  if (width == 0) {
    return 0;
  }
  const u64 bit = index * width;
  const int shift = (int)(bit % kWordBits);
  u64 field = load_word(words, bit / kWordBits) >> shift;
  if (shift + width > kWordBits) {
    field |= load_word(words, bit / kWordBits + 1) << (kWordBits - shift);
  }
  return field & ((1ull << width) - 1);
}

// `count` different indices below `numel`, ascending, all with the same probability.
//
// From a random start, the circle of all indices is divided into `count` runs of nearly equal
// length, and one index is drawn from each. An index falls into a given run of length s with
// probability s/numel, and is drawn from it with probability 1/s. This takes `count` random
// numbers; a permutation would take `numel`.
struct RandomIndices {
  Random random;
  u64 rotation;  // below numel: where the first run starts
  u64 numel;
  u64 count;
  u64 first;  // the run that contains the smallest index

  COMMHOOKS_HD RandomIndices(u64 seed, u64 rotation, u64 numel, u64 count)
      : random(seed), rotation(rotation), numel(numel), count(count), first(0) {
    if (rotation > 0) {
      // Runs that end beyond the last index continue at 0; this run may be split in two there.
      first = (numel - rotation) * count / numel;
      first += draw(first) + rotation < numel;
    }
  }

  COMMHOOKS_HD u64 start(u64 run) const {
    return run * numel / count;
  }

  // Returns the index drawn from a run, before the rotation.
  COMMHOOKS_HD u64 draw(u64 run) const {
    const u64 begin = start(run);
    return begin + (random.bits((u32)run) * (start(run + 1) - begin) >> 32);
  }

  COMMHOOKS_HD u64 at(u64 position) const {
    const u64 run = position + first;
    const u64 index = draw(run < count ? run : run - count) + rotation;
    return index < numel ? index : index - numel;
  }
};

}  // namespace commhooks::codecs
