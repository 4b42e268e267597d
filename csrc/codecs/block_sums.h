// Sums over several blocks at a time, in the order of Note [Order of sums] in
// kernels/codecs/block.h.
#pragma once

#include "codecs/blocks.h"

namespace commhooks {

// The largest number of blocks: whole vectors on any machine, and two of the longest vectors, so
// that the sums and roots of one overlap with those of the other.
constexpr int64_t kMaxBlocks = 32;

static_assert(kMaxBlockSize == codecs::kChunk * codecs::kMaxChunks);

// Combines the two halves of each run of 2 * half numbers, in two vectors. In the result, runs of
// the first and of the second vector alternate.
template <typename Set, int half, typename Vector, typename Combine>
COMMHOOKS_INLINE Vector combine_halves(Vector one, Vector other, Combine combine) {
  const auto lower = for_lanes<typename Vectors<Set>::Ints>([](int lane) {
    const int run = lane / half;
    return run % 2 * Set::kFloats + run / 2 * 2 * half + lane % half;
  });
  return combine(__builtin_shuffle(one, other, lower), __builtin_shuffle(one, other, lower + half));
}

// Reduces each of as many vectors as a vector has lanes, by halves; the result of vector i is in
// lane i.
template <typename Set, int half = Set::kFloats / 2, typename Vector, typename Combine>
COMMHOOKS_INLINE Vector reduce_each(Vector* vectors, Combine combine) {
  for (int i = 0; i < half; ++i) {
    vectors[i] = combine_halves<Set, half>(vectors[i], vectors[i + half], combine);
  }
  if constexpr (half > 1) {
    return reduce_each<Set, half / 2>(vectors, combine);
  } else {
    return vectors[0];
  }
}

// Adds the halves of a chunk, in registers, until it is one vector: numbers `step` apart are added
// after numbers that are twice as far apart.
template <typename Set, bool squares, int width, int step = Set::kFloats>
COMMHOOKS_INLINE auto sum_to_vector(const float* y, float inverse) {
  if constexpr (step < width) {
    return sum_to_vector<Set, squares, width, 2 * step>(y, inverse) +
        sum_to_vector<Set, squares, width, 2 * step>(y + step, inverse);
  } else {
    using Words = typename Vectors<Set>::Words;
    using Floats = typename Vectors<Set>::Floats;
    const Floats ratios = load<Floats>(y) * inverse;
    if constexpr (squares) {
      return ratios * ratios;
    } else {
      return reinterpret_cast<Floats>(reinterpret_cast<Words>(ratios) & 0x7fffffffu);
    }
  }
}

// The same for each chunk of all blocks, whose width is a power of two of at least kTile, as a
// constant.
template <typename Set, bool squares, int constant = codecs::kChunk>
COMMHOOKS_INLINE void sum_chunks(
    const float* y,
    int64_t width,
    int64_t chunks,
    int64_t blocks,
    const float* inverses,
    typename Vectors<Set>::Floats* vectors) {
  if (width == constant) {
    for (int64_t block = 0; block < blocks; ++block) {
      for (int64_t i = block * chunks; i < (block + 1) * chunks; ++i) {
        vectors[i] = sum_to_vector<Set, squares, constant>(y + i * constant, inverses[block]);
      }
    }
  } else if constexpr (constant > kTile) {
    sum_chunks<Set, squares, constant / 2>(y, width, chunks, blocks, inverses, vectors);
  }
}

// Sets sums[i] to the sum over block i of |y| * inverses[i], or of its square. See Note [Order of
// sums].
template <typename Set, bool squares>
COMMHOOKS_INLINE void sum_blocks(
    const float* y, int64_t block_size, int64_t blocks, const float* inverses, float* sums) {
  using Floats = typename Vectors<Set>::Floats;
  const int64_t width = std::min<int64_t>(block_size, codecs::kChunk);
  const int64_t chunks = block_size / width;
  Floats vectors[kMaxBlocks] = {};
  sum_chunks<Set, squares>(y, width, chunks, blocks, inverses, vectors);
  alignas(64) float of_chunks[kMaxBlocks];
  for (int64_t i = 0; i < kMaxBlocks; i += Set::kFloats) {
    const auto sums_of_vectors = reduce_each<Set>(
        vectors + i, [](Floats one, Floats other) COMMHOOKS_ALWAYS_INLINE { return one + other; });
    store(of_chunks + i, sums_of_vectors);
  }
  for (int64_t block = 0; block < blocks; ++block) {
    float* const terms = of_chunks + block * chunks;
    for (int64_t half = chunks / 2; half > 0; half /= 2) {
      for (int64_t i = 0; i < half; ++i) {
        terms[i] += terms[half + i];
      }
    }
    sums[block] = terms[0];
  }
}

}  // namespace commhooks
