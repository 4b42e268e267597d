// Sums over blocks, in the order that codecs/block.h gives, of several blocks at once.
#pragma once

#include "cpu/blocks.h"

namespace commhooks {

// How many blocks there are at most: whole vectors on any machine, two of the longest, so that one's
// sums and roots overlap with the other's.
constexpr int64_t kMostBlocks = 32;

static_assert(kMaxBlockSize == codecs::kChunk * codecs::kMaxChunks);

// Of two vectors, each of which is made of runs of 2 * half numbers: adds the halves of each run. Runs
// of the first and the second take turns in the result.
template <typename Set, int half>
COMMHOOKS_INLINE auto add_halves(
    typename Vectors<Set>::Floats one, typename Vectors<Set>::Floats other) {
  const auto lower = for_lanes<typename Vectors<Set>::Places>([](int lane) {
    const int run = lane / half;
    return run % 2 * Set::kFloats + run / 2 * 2 * half + lane % half;
  });
  return __builtin_shuffle(one, other, lower) + __builtin_shuffle(one, other, lower + half);
}

// The sum of each of as many vectors as one has lanes, by halves: that of vector i in lane i.
template <typename Set, int half = Set::kFloats / 2>
COMMHOOKS_INLINE auto sum_each(typename Vectors<Set>::Floats* vectors) {
  for (int i = 0; i < half; ++i) {
    vectors[i] = add_halves<Set, half>(vectors[i], vectors[i + half]);
  }
  if constexpr (half > 1) {
    return sum_each<Set, half / 2>(vectors);
  } else {
    return vectors[0];
  }
}

// The terms of a chunk of y, halved until they are a vector.
template <typename Set, bool squares>
COMMHOOKS_INLINE auto sum_to_vector(const float* y, int64_t width, float inverse) {
  using Floats = typename Vectors<Set>::Floats;
  alignas(64) float sums[codecs::kChunk / 2];
  int64_t half = width / 2;
  for (int64_t i = 0; i < half; ++i) {
    sums[i] =
        codecs::sum_term<squares>(y[i], inverse) + codecs::sum_term<squares>(y[half + i], inverse);
  }
  for (half /= 2; half >= Set::kFloats; half /= 2) {
    for (int64_t i = 0; i < half; i += Set::kFloats) {
      store(sums + i, load<Floats>(sums + i) + load<Floats>(sums + half + i));
    }
  }
  return load<Floats>(sums);
}

// See Note [Order of sums]. sums[i] = the sum over block i of |y| * inverses[i], or of its square.
template <typename Set, bool squares>
COMMHOOKS_INLINE void sum_blocks(
    const float* y, int64_t block_size, int64_t blocks, const float* inverses, float* sums) {
  using Floats = typename Vectors<Set>::Floats;
  const int64_t width = std::min<int64_t>(block_size, codecs::kChunk);
  const int64_t chunks = block_size / width;
  Floats vectors[kMostBlocks] = {};
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t i = block * chunks; i < (block + 1) * chunks; ++i) {
      vectors[i] = sum_to_vector<Set, squares>(y + i * width, width, inverses[block]);
    }
  }
  alignas(64) float of_chunks[kMostBlocks];
  for (int64_t i = 0; i < kMostBlocks; i += Set::kFloats) {
    store(of_chunks + i, sum_each<Set>(vectors + i));
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
