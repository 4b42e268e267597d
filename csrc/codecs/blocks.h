// What the loops over blocks of all codecs of commhooks/kernels/codecs share. A block is read from memory
// once and written once; all passes in between are over buffers that stay in the first-level cache.
#pragma once

#include "kernels/codecs/block.h"
#include "codecs/block_codec.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

// A multiplication and an addition are rounded one by one, also where one instruction could do both: not
// all machines have it, and all are to give the same bits. This holds for what is written below it, so
// also for the functions that loops are inlined into.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#else
#pragma STDC FP_CONTRACT OFF
#endif

#include "shared/instruction_sets.h"

namespace commhooks {

constexpr int64_t kMaxBlockSize = 4096;

// Loops over scratch memory go in whole tiles: a remainder costs as much as the loop where blocks are
// small.
constexpr int64_t kTile = 64;

// As many as a register holds.
template <typename Set>
struct Vectors {
  static constexpr int kBytes = Set::kFloats * sizeof(float);
  using Floats [[gnu::vector_size(kBytes)]] = float;
  using Words [[gnu::vector_size(kBytes)]] = uint32_t;
  using Places [[gnu::vector_size(kBytes)]] = int32_t;
};

// at(lane) of each lane, a constant: `at` captures nothing.
template <typename Vector, typename At>
COMMHOOKS_INLINE Vector for_lanes(At /*at*/) {
  return []<size_t... lane>(std::index_sequence<lane...>) COMMHOOKS_ALWAYS_INLINE {
    constexpr Vector lanes = {At()(static_cast<int>(lane))...};
    return lanes;
  }(std::make_index_sequence<sizeof(Vector) / sizeof(Vector{}[0])>());
}

// At any alignment.
template <typename T>
COMMHOOKS_INLINE T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename T>
COMMHOOKS_INLINE void store(void* to, const T& value) {
  std::memcpy(to, &value, sizeof(value));
}

// Where a block is: of the parts, of all numbers, and how many it has, which may be none.
struct Place {
  int64_t part;
  int64_t block;  // of the part
  int64_t first;
  int64_t count;
};

inline Place place_of(const Parts& parts, int64_t index) {
  const int64_t part = index / parts.blocks_per_part();
  const int64_t block = index % parts.blocks_per_part();
  const int64_t offset = block * parts.block_size;
  const int64_t first = part * parts.part_length + offset;
  const int64_t left = std::min(parts.part_length - offset, parts.numel - first);
  return {part, block, first, std::clamp<int64_t>(left, 0, parts.block_size)};
}

// Asks for memory that is needed soon. While codes are computed the CPU does not see as far as the
// next block, and its own prefetching begins anew with each.
template <typename T>
COMMHOOKS_INLINE void prefetch(const T* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(T))) {
    __builtin_prefetch(from + i);
  }
}

}  // namespace commhooks
