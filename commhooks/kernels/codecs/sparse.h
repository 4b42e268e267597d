// The arithmetic of sparse gradients.
#pragma once

#include "codecs/portable.h"
#include "codecs/random.h"

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

// How ascending indices are written; see Note [Index code] in commhooks/codecs/index_code.py.
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

// `count` different indices below `numel`, ascending, each of which has the same chance.
//
// The circle of all indices is cut into `count` runs as equal as can be, from a random start, and one
// index is drawn out of each. An index falls into a given run of s with probability s/numel and is
// drawn there with 1/s. Costs `count` random numbers; a permutation would cost `numel`.
struct RandomIndices {
  Random random;
  u64 rotation;  // below numel: where the first run starts
  u64 numel;
  u64 count;
  u64 first;  // the run with the smallest index

  COMMHOOKS_HD RandomIndices(u64 seed, u64 rotation, u64 numel, u64 count)
      : random(seed), rotation(rotation), numel(numel), count(count), first(0) {
    if (rotation > 0) {
      // Runs that end beyond the last index begin anew at 0; this one may be cut in two there.
      first = (numel - rotation) * count / numel;
      first += draw(first) + rotation < numel;
    }
  }

  COMMHOOKS_HD u64 start(u64 run) const {
    return run * numel / count;
  }

  // Of the run, before the rotation.
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
