// Encodes the numbers of a block whose groups have scales of their own.
#pragma once

#include "codecs/block_sums.h"
#include "codecs/blocks.h"

namespace commhooks {

// The groups of one block; numbers after the block are zeros, up to the next tile.
template <int group>
struct Groups {
  static constexpr int64_t kMaxGroups = kMaxBlockSize / group;
  alignas(64) float largest[kMaxGroups];
  alignas(64) float inverses[kMaxGroups];
  alignas(64) float scales[kMaxGroups];
  alignas(64) uint8_t codes[kMaxGroups];
};

// Finds the largest magnitude of each of `count` groups in y.
template <typename Set, int group>
COMMHOOKS_INLINE void find_largest(const float* y, int64_t count, float* largest) {
  using Ints = typename Vectors<Set>::Ints;
  constexpr int64_t lanes = Set::kFloats;
  const auto larger = [](Ints one, Ints other)
                          COMMHOOKS_ALWAYS_INLINE { return one > other ? one : other; };
  for (int64_t first = 0; first < count; first += lanes) {
    Ints vectors[lanes];
    for (int64_t i = 0; i < lanes; ++i) {
      // The last vectors may have no group; they take the last one.
      const float* const from = y + std::min(first + i, count - 1) * group;
      vectors[i] = load<Ints>(from) & 0x7fffffff;
      for (int64_t k = lanes; k < group; k += lanes) {
        vectors[i] = larger(vectors[i], load<Ints>(from + k) & 0x7fffffff);
      }
    }
    store(largest + first, reduce_each<Set>(vectors, larger));
  }
}

// Multiplies each group by its factor.
template <typename Set, int group>
COMMHOOKS_INLINE void multiply_groups(float* y, const float* factors, int64_t count) {
  using Floats = typename Vectors<Set>::Floats;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = i * group; k < (i + 1) * group; k += Set::kFloats) {
      store(y + k, load<Floats>(y + k) * factors[i]);
    }
  }
}

// Computes the codes of the groups, with zeros after the last number, and divides the numbers by
// the scales of their groups.
template <typename Set, typename Codec>
COMMHOOKS_INLINE void scale_groups(
    const Codec& codec,
    float* y,
    float inverse,
    float scale,
    int64_t count,
    Groups<Codec::kGroup>& groups) {
  constexpr int64_t group = Codec::kGroup;
  const int64_t padded = (count + kTile - 1) / kTile * kTile / group;
  find_largest<Set, group>(y, padded, groups.largest);
  for (int64_t i = 0; i < padded; ++i) {
    const codecs::u32 code = codec.group_code(groups.largest[i] * inverse);
    const float group_scale = codec.group_scale(code);
    groups.codes[i] = static_cast<uint8_t>(code);
    groups.inverses[i] = codecs::group_inverse(inverse, group_scale);
    groups.scales[i] = group_scale * scale;
  }
  for (int64_t i = (count + group - 1) / group; i < padded; ++i) {
    groups.codes[i] = 0;
  }
  multiply_groups<Set, Codec::kGroup>(y, groups.inverses, padded);
}

// Subtracts what is decoded from `count` values; y is scratch memory.
template <typename Set, typename Codec, typename T>
COMMHOOKS_INLINE void subtract_groups(
    const Codec& codec,
    const Groups<Codec::kGroup>& groups,
    const uint8_t* __restrict codes,
    int64_t count,
    float* __restrict y,
    T* __restrict values) {
  const int64_t padded = (count + kTile - 1) / kTile * kTile;
  for (int64_t i = 0; i < padded; ++i) {
    y[i] = codec.value(codes[i]);
  }
  multiply_groups<Set, Codec::kGroup>(y, groups.scales, padded / Codec::kGroup);
  for (int64_t i = 0; i < count; ++i) {
    values[i] -= static_cast<T>(y[i]);
  }
}

}  // namespace commhooks
