#include "sparse/indices.h"

#include "kernels/codecs/sparse.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace commhooks {
namespace {

using codecs::IndexCode;
using codecs::kWordBits;

constexpr int64_t kGrainElements = 1 << 18;

int64_t words_of(int64_t bits) {
  return (bits + kWordBits - 1) / kWordBits;
}

void store(uint8_t* words, int64_t index, uint64_t word) {
  std::memcpy(words + index * sizeof(word), &word, sizeof(word));
}

// Writes consecutive fields of one width.
class BitWriter {
 public:
  BitWriter(uint8_t* words, int width) : words_(words), width_(width) {}

  void put(uint64_t field) {
    word_ |= field << used_;
    used_ += width_;
    if (used_ >= kWordBits) {
      used_ -= kWordBits;
      store(words_, index_++, word_);
      word_ = used_ == 0 ? 0 : field >> (width_ - used_);
    }
  }

  void flush() {
    if (used_ > 0) {
      store(words_, index_, word_);
    }
  }

 private:
  uint8_t* words_;
  int width_;
  int used_ = 0;
  int64_t index_ = 0;
  uint64_t word_ = 0;
};

void pack(
    const int32_t* indices, int64_t count, IndexCode code, int64_t high_words, uint8_t* packed) {
  uint64_t word = 0;
  int64_t at = 0;
  BitWriter low(packed + high_words * sizeof(word), code.low_bits);
  for (int64_t ordinal = 0; ordinal < count; ++ordinal) {
    const auto position = static_cast<int64_t>(code.position(indices[ordinal], ordinal));
    for (; at < position / kWordBits; ++at) {
      store(packed, at, word);
      word = 0;
    }
    word |= uint64_t{1} << (position % kWordBits);
    low.put(code.low(indices[ordinal]));
  }
  for (; at < high_words; ++at) {
    store(packed, at, word);
    word = 0;
  }
  low.flush();
}

// Returns whether the result is `count` ascending indices below `numel`.
bool unpack(
    const uint8_t* packed,
    int64_t count,
    IndexCode code,
    int64_t high_words,
    int64_t numel,
    int32_t* indices) {
  const uint8_t* const low = packed + high_words * sizeof(uint64_t);
  int64_t ordinal = 0;
  int64_t previous = -1;
  bool ascends = true;
  for (int64_t at = 0; at < high_words; ++at) {
    for (uint64_t bits = codecs::load_word(packed, at); bits != 0; bits &= bits - 1) {
      if (ordinal == count) {
        return false;
      }
      const int64_t position = at * kWordBits + std::countr_zero(bits);
      const auto index = static_cast<int64_t>(
          code.index(position, ordinal, codecs::read_field(low, code.low_bits, ordinal)));
      ascends &= index > previous;
      previous = index;
      indices[ordinal++] = static_cast<int32_t>(index);
    }
  }
  return ascends && ordinal == count && previous < numel;
}

// Looks at the first and the last of ascending indices.
void check_range(const at::Tensor& indices, int64_t numel) {
  const auto* const first = indices.const_data_ptr<int32_t>();
  const int64_t last = indices.numel() - 1;
  TORCH_CHECK(
      last < 0 || (0 <= first[0] && first[0] <= first[last] && first[last] < numel),
      "Expected indices below ", numel, ", found [", first[0], ", ", first[last], "].");
}

}  // namespace

void pack_indices(
    const at::Tensor& indices,
    int64_t high_bits,
    int64_t low_bits,
    bool adds_ordinal,
    at::Tensor& packed) {
  const IndexCode code{static_cast<int>(low_bits), adds_ordinal};
  check_range(indices, (high_bits - (adds_ordinal ? indices.numel() - 1 : 0)) << low_bits);
  pack(
      indices.const_data_ptr<int32_t>(), indices.numel(), code, words_of(high_bits),
      packed.mutable_data_ptr<uint8_t>());
}

void unpack_indices(
    const at::Tensor& packed,
    int64_t high_bits,
    int64_t low_bits,
    bool adds_ordinal,
    int64_t numel,
    at::Tensor& indices) {
  const IndexCode code{static_cast<int>(low_bits), adds_ordinal};
  TORCH_CHECK(
      unpack(
          packed.const_data_ptr<uint8_t>(), indices.numel(), code, words_of(high_bits), numel,
          indices.mutable_data_ptr<int32_t>()),
      "Expected ", indices.numel(), " ascending indices below ", numel,
      " in a message: it is corrupted, or ranks have different options.");
}

void scatter_add(const at::Tensor& values, const at::Tensor& indices, at::Tensor& out) {
  check_range(indices, out.numel());
  const auto* const first = indices.const_data_ptr<int32_t>();
  const auto* const last = first + indices.numel();
  AT_DISPATCH_FLOATING_TYPES(out.scalar_type(), "scatter_add", [&] {
    const auto* const from = values.const_data_ptr<scalar_t>();
    auto* const to = out.mutable_data_ptr<scalar_t>();
    // Each thread adds to its own range.
    at::parallel_for(0, out.numel(), kGrainElements, [&](int64_t begin, int64_t end) {
      const auto* const stop = std::lower_bound(first, last, end);
      for (const auto* at = std::lower_bound(first, last, begin); at < stop; ++at) {
        to[*at] += from[at - first];
      }
    });
  });
}

void draw_indices(int64_t seed, int64_t rotation, int64_t numel, at::Tensor& indices) {
  const int64_t count = indices.numel();
  if (count == 0) {
    return;
  }
  const codecs::RandomIndices random(
      static_cast<uint64_t>(seed), static_cast<uint64_t>(rotation), static_cast<uint64_t>(numel),
      static_cast<uint64_t>(count));
  auto* const out = indices.mutable_data_ptr<int32_t>();
  at::parallel_for(0, count, kGrainElements, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      out[i] = static_cast<int32_t>(random.at(static_cast<uint64_t>(i)));
    }
  });
}

}  // namespace commhooks
