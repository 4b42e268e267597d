// The common parts of the loops over blocks, for all codecs in commhooks/kernels/codecs. A block is
// read from memory once and written once; all other passes are over buffers in the first-level
// cache.
#pragma once

#include "codecs/block_codec.h"
#include "kernels/codecs/block.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

// Multiplications and additions are rounded separately, even if one instruction could do both, so
// that all machines compute the same bits. This applies to the code below, and therefore also to
// the functions that loops are inlined into.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#else
#pragma STDC FP_CONTRACT OFF
#endif

#include "shared/instruction_sets.h"

namespace commhooks {

constexpr int64_t kMaxBlockSize = 4096;

// Loops over scratch memory handle whole tiles: for small blocks, a loop over the remainder would
// cost as much as the loop itself.
constexpr int64_t kTile = 64;

// Vectors as wide as a register.
template <typename Set>
struct Vectors {
  static constexpr int kBytes = Set::kFloats * sizeof(float);
  using Floats [[gnu::vector_size(kBytes)]] = float;
  using Words [[gnu::vector_size(kBytes)]] = uint32_t;
  using Ints [[gnu::vector_size(kBytes)]] = int32_t;
};

// Returns a constant vector of at(lane) for each lane; `at` captures nothing.
template <typename Vector, typename At>
COMMHOOKS_INLINE Vector for_lanes(At /*at*/) {
  return []<size_t... lane>(std::index_sequence<lane...>) COMMHOOKS_ALWAYS_INLINE {
    constexpr Vector lanes = {At()(static_cast<int>(lane))...};
    return lanes;
  }(std::make_index_sequence<sizeof(Vector) / sizeof(Vector{}[0])>());
}

// For addresses of any alignment.
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

// The place of a block in the parts and among all numbers, and its number of elements, which may be
// 0.
struct Place {
  int64_t part;
  int64_t block;  // in the part
  int64_t first;
  int64_t count;
};

inline Place place_of(const Parts& parts, int64_t index) {
  const int64_t part = index / parts.blocks_per_part;
  const int64_t block = index % parts.blocks_per_part;
  const int64_t offset = block * parts.block_size;
  const int64_t first = part * parts.part_length + offset;
  const int64_t left = std::min(parts.part_length - offset, parts.numel - first);
  return {part, block, first, std::clamp<int64_t>(left, 0, parts.block_size)};
}

// Prefetches memory that is needed soon. While codes are computed the CPU does not look ahead to
// the next block, and its own prefetching starts over with each block.
template <typename T>
COMMHOOKS_INLINE void prefetch(const T* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(T))) {
    __builtin_prefetch(from + i);
  }
}

}  // namespace commhooks
