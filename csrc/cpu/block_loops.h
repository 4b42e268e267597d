// The loops over blocks, for any codec of commhooks/kernels/codecs. A block is read from memory once and written
// once; all passes in between are over buffers that stay in the first-level cache.
#pragma once

#include "codecs/block.h"
#include "cpu/block_codec.h"
#include "cpu/multiversion.h"

#include <algorithm>
#include <cstring>
#include <vector>

// A multiplication and an addition are rounded one by one, also where one instruction could do both:
// not all machines have it, and all are to give the same bits.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#else
#pragma STDC FP_CONTRACT OFF
#endif

namespace commhooks {

constexpr int64_t kMaxBlockSize = 4096;
// How many elements ahead of its use memory is asked for.
constexpr int64_t kAhead = 1024;
// The same for bytes of codes. Messages are as many streams as there are ranks, more than the CPU's own
// prefetching follows.
constexpr int64_t kCodesAhead = 320;

// Loops over scratch memory go in whole tiles: a remainder costs as much as the loop where blocks are
// small.
constexpr int64_t kTile = 64;

COMMHOOKS_INLINE int64_t pad(int64_t count) {
  return (count + kTile - 1) / kTile * kTile;
}

// Up to a power of two, or whole chunks: see Note [Order of sums].
COMMHOOKS_INLINE int64_t pad_for_sums(int64_t count) {
  int64_t width = 64;
  while (width < count && width < codecs::kChunk) {
    width *= 2;
  }
  return (count + width - 1) / width * width;
}

inline float load_float(const uint8_t* from) {
  float value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline void store_float(uint8_t* to, float value) {
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

// y = values + error, or values alone; returns the bits of the largest |y|.
template <typename T>
COMMHOOKS_INLINE uint32_t load_sums(
    const T* __restrict values, const T* __restrict error, float* __restrict y, int64_t count) {
  int32_t largest = 0;  // magnitudes have no sign bit, and signed maxima are an instruction
  if (error == nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      y[i] = static_cast<float>(values[i]);
      largest = std::max(largest, static_cast<int32_t>(codecs::magnitude_bits(y[i])));
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      y[i] = static_cast<float>(values[i] + error[i]);
      largest = std::max(largest, static_cast<int32_t>(codecs::magnitude_bits(y[i])));
    }
  }
  return static_cast<uint32_t>(largest);
}

constexpr int64_t kLanes = 16;
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));
static_assert(kMaxBlockSize == codecs::kChunk * codecs::kMaxChunks);

COMMHOOKS_INLINE Lanes load_lanes(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

// By halves, the sum of numbers whose count is a power of two, in whole lanes. Overwrites them.
COMMHOOKS_INLINE float sum_by_halves(float* terms, int64_t count) {
  for (int64_t half = count / 2; half >= kLanes; half /= 2) {
    for (int64_t i = 0; i < half; i += kLanes) {
      const Lanes sums = load_lanes(terms + i) + load_lanes(terms + half + i);
      std::memcpy(terms + i, &sums, sizeof(sums));
    }
  }
  for (int64_t half = kLanes / 2; half >= 1; half /= 2) {
    for (int64_t i = 0; i < half; ++i) {
      terms[i] += terms[half + i];
    }
  }
  return terms[0];
}

template <bool squares>
COMMHOOKS_INLINE float sum_of_chunk(const float* y, int64_t width, float inverse) {
  alignas(64) float terms[codecs::kChunk];
  for (int64_t i = 0; i < width; ++i) {
    terms[i] = codecs::sum_term<squares>(y[i], inverse);
  }
  return sum_by_halves(terms, width);
}

// See Note [Order of sums]. y has zeros behind it, up to pad_for_sums(count).
template <bool squares>
COMMHOOKS_INLINE float sum_of_ratios(const float* y, int64_t count, float largest) {
  const float inverse = 1.0f / largest;
  if (count <= codecs::kChunk) {
    return sum_of_chunk<squares>(y, pad_for_sums(count), inverse);
  }
  alignas(64) float totals[kLanes] = {};
  for (int64_t i = 0; i < count; i += codecs::kChunk) {
    totals[i / codecs::kChunk] = sum_of_chunk<squares>(y + i, codecs::kChunk, inverse);
  }
  return sum_by_halves(totals, kLanes);
}

COMMHOOKS_INLINE float norm_of(codecs::Norm norm, const float* y, int64_t count, float largest) {
  if (norm == codecs::Norm::kLargest) {
    return largest;
  }
  const float sum = codecs::sums_squares(norm) ? sum_of_ratios<true>(y, count, largest)
                                               : sum_of_ratios<false>(y, count, largest);
  return codecs::norm_from(norm, largest, sum, static_cast<int>(count));
}

// `count` codes, one per byte, into `bits` each, lowest bits first. `codes` has room for the codes
// that fill the last byte, and zeros there.
template <int bits>
COMMHOOKS_INLINE void pack(const uint8_t* codes, uint8_t* packed, int64_t count) {
  const int64_t bytes = (count * bits + 7) / 8;
  for (int64_t i = 0; i < bytes; ++i) {
    if constexpr (bits == 1) {
      uint64_t eight;
      std::memcpy(&eight, codes + 8 * i, sizeof(eight));
      // The product gathers bit 0 of byte k in bit 56 + k.
      packed[i] = static_cast<uint8_t>((eight * 0x0102040810204080u) >> 56);
    } else if constexpr (bits == 2) {
      uint32_t four;
      std::memcpy(&four, codes + 4 * i, sizeof(four));
      packed[i] = static_cast<uint8_t>(four | (four >> 6) | (four >> 12) | (four >> 18));
    } else if constexpr (bits == 4) {
      uint16_t two;
      std::memcpy(&two, codes + 2 * i, sizeof(two));
      packed[i] = static_cast<uint8_t>(two | (two >> 4));
    } else {
      packed[i] = codes[i];
    }
  }
}

// Asks for memory that is needed soon. While codes are computed the CPU does not see as far as the
// next block, and its own prefetching begins anew with each.
template <typename T>
COMMHOOKS_INLINE void prefetch(const T* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(T))) {
    __builtin_prefetch(from + i);
  }
}

template <typename Codec, typename T>
COMMHOOKS_INLINE void encode_blocks(
    const Codec& codec, const EncodeCall& call, int64_t begin, int64_t end) {
  alignas(64) float y[kMaxBlockSize];
  alignas(64) uint8_t codes[kMaxBlockSize + 8];
  for (int64_t index = begin; index < end; ++index) {
    const auto [part, block, first, count] = place_of(call.parts, index);
    T* __restrict const values = static_cast<T*>(call.values) + first;
    const T* __restrict const error =
        call.error == nullptr ? nullptr : static_cast<const T*>(call.error) + first;
    prefetch(values + kAhead, count);
    if (error != nullptr) {
      prefetch(error + kAhead, count);
    }
    const uint32_t largest = load_sums(values, error, y, count);
    std::fill(y + count, y + pad_for_sums(count), 0.0f);

    uint8_t* const message = call.messages + part * call.message_bytes;
    const int64_t code_bytes = call.parts.block_size * Codec::kBits / 8;
    const int64_t codes_begin = call.codes_offset + block * code_bytes;
    uint8_t* const packed = message + codes_begin;
    // Those of the numbers there are; then zeros, for those that the part has not.
    const int64_t packed_bytes = (count * Codec::kBits + 7) / 8;
    const int64_t room = std::min(code_bytes, call.message_bytes - codes_begin);
    std::memset(packed + packed_bytes, 0, static_cast<size_t>(room - packed_bytes));
    const bool has_scale = codecs::has_scale(largest);
    float scale = codecs::scale_without(largest);
    if (has_scale) {
      const float size = codecs::float_of(largest);
      scale = codec.scale(size, norm_of(codec.norm, y, count, size));
      const float inverse = 1.0f / scale;
      const codecs::Random random = codecs::random_for(call.seed, static_cast<uint64_t>(first));
      const auto first_index = static_cast<uint32_t>(first);
      const auto padded = static_cast<int32_t>(pad(count));
      for (int32_t i = 0; i < padded; ++i) {  // an index as wide as the numbers
        codes[i] = static_cast<uint8_t>(
            codec.code(y[i] * inverse, random, first_index + static_cast<uint32_t>(i)));
      }
      std::fill(codes + count, codes + (count + 7) / 8 * 8, uint8_t{0});
      pack<Codec::kBits>(codes, packed, count);
    } else {
      std::memset(packed, 0, static_cast<size_t>(packed_bytes));
    }
    store_float(message + 4 * block, scale);

    if (!call.keep_residual) {
      continue;
    }
    if (error != nullptr) {
      for (int64_t i = 0; i < count; ++i) {
        values[i] += error[i];
      }
    }
    if (has_scale) {
      for (int64_t i = 0; i < count; ++i) {
        values[i] -= static_cast<T>(codec.value(codes[i]) * scale);
      }
    }
  }
}

struct alignas(64) Tile {
  float numbers[kTile];
};

// Adds value(code) * weight, for the codes of one message after the other; the sums stay in registers.
// Codes of at most four bits are looked up: one instruction does so for eight of them, by the four
// lowest bits of their lanes. The table repeats where codes have fewer.
template <typename Codec, int bits = Codec::kBits>
class TileSum {
 public:
  COMMHOOKS_INLINE explicit TileSum(const Codec& codec) {
    for (uint32_t code = 0; code < 8; ++code) {
      low_[code] = codec.value(code & kMask);
      high_[code] = codec.value((code + 8) & kMask);
    }
    for (Eight& sum : sums_) {
      sum = -Eight{};  // plus any x, also -0, is x
    }
  }

  COMMHOOKS_INLINE void add(const uint8_t* packed, float weight) {
    const Lanes shifts = {0, bits, 2 * bits, 3 * bits, 4 * bits, 5 * bits, 6 * bits, 7 * bits};
    const Eight low = low_ * weight;
    const Eight high = high_ * weight;
    for (int i = 0; i < kTile / 8; ++i) {
      uint32_t word;
      std::memcpy(&word, packed + i / kEightsPerWord * 4, sizeof(word));
      const Lanes codes = (Lanes{} + word) >> (shifts + i % kEightsPerWord * 8u * bits);
      sums_[i] += __builtin_shuffle(low, high, reinterpret_cast<Places>(codes));
    }
  }

  COMMHOOKS_INLINE Tile total() const {
    Tile tile;
    std::memcpy(tile.numbers, sums_, sizeof(tile.numbers));
    return tile;
  }

 private:
  using Eight = float __attribute__((vector_size(32)));
  using Lanes = uint32_t __attribute__((vector_size(32)));
  using Places = int32_t __attribute__((vector_size(32)));
  static constexpr uint32_t kMask = (1u << bits) - 1;
  static constexpr int kEightsPerWord = 4 / bits;

  Eight low_;
  Eight high_;
  Eight sums_[kTile / 8];
};

template <typename Codec>
class TileSum<Codec, 8> {
 public:
  COMMHOOKS_INLINE explicit TileSum(const Codec& codec) : codec_(codec) {
    for (Eight& sum : sums_) {
      sum = -Eight{};
    }
  }

  COMMHOOKS_INLINE void add(const uint8_t* codes, float weight) {
    Tile tile;  // in one loop, which every instruction set has wide enough vectors for
    for (int64_t i = 0; i < kTile; ++i) {
      tile.numbers[i] = codec_.value(codes[i]);
    }
#pragma GCC unroll 8  // else the sums are in memory, and each message waits for the one before
    for (int64_t i = 0; i < kTile / 8; ++i) {
      Eight numbers;
      std::memcpy(&numbers, tile.numbers + 8 * i, sizeof(numbers));
      sums_[i] += numbers * weight;
    }
  }

  COMMHOOKS_INLINE Tile total() const {
    Tile tile;
    std::memcpy(tile.numbers, sums_, sizeof(tile.numbers));
    return tile;
  }

 private:
  using Eight = float __attribute__((vector_size(32)));

  Codec codec_;
  Eight sums_[kTile / 8];
};

// Whether several messages are averaged, or vote on the sign.
enum class Several { kMean, kMajority };

// What a message tells of a block.
struct Share {
  const uint8_t* codes;
  float weight;
};

// The shares of all messages of the block's part. Returns the mean of their scales.
template <Several several, int bits>
COMMHOOKS_INLINE float find_shares(
    const DecodeCall& call, const Place& place, std::vector<Share>& shares) {
  const int64_t code_bytes = call.parts.block_size * bits / 8;
  const float share = 1.0f / static_cast<float>(call.message_count);
  const uint8_t* message = call.messages + place.part * call.message_count * call.message_bytes;
  float mean_scale = 0.0f;
  for (Share& own : shares) {
    const float scale = load_float(message + 4 * place.block);
    const bool is_vote = several == Several::kMajority;
    own.codes = message + call.codes_offset + place.block * code_bytes;
    own.weight = is_vote ? (scale == 0.0f ? 0.0f : 1.0f) : scale * share;
    mean_scale += scale * share;
    prefetch(own.codes + kCodesAhead, code_bytes);
    message += call.message_bytes;
  }
  return mean_scale;
}

// Numbers of a block whose codes begin `offset` bytes behind the block's.
template <typename Codec>
COMMHOOKS_INLINE Tile
sum_tile(const Codec& codec, const std::vector<Share>& shares, int64_t offset) {
  TileSum<Codec> sum(codec);
  for (const Share& share : shares) {
    sum.add(share.codes + offset, share.weight);
  }
  return sum.total();
}

// The same where a block ends: nothing is read behind the codes of `count` numbers.
template <typename Codec>
COMMHOOKS_INLINE Tile sum_part_of_tile(
    const Codec& codec, const std::vector<Share>& shares, int64_t offset, int64_t count) {
  TileSum<Codec> sum(codec);
  for (const Share& share : shares) {
    uint8_t whole[kTile] = {};
    std::memcpy(whole, share.codes + offset, static_cast<size_t>((count * Codec::kBits + 7) / 8));
    sum.add(whole, share.weight);
  }
  return sum.total();
}

template <typename T>
COMMHOOKS_INLINE void store_tile(
    const Tile& tile, T* __restrict values, T* __restrict kept, int64_t count) {
  if (kept != nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      kept[i] = values[i];
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    values[i] = static_cast<T>(tile.numbers[i]);
  }
}

template <Several several, typename Codec, typename T>
COMMHOOKS_INLINE void decode_blocks(
    const Codec& codec, const DecodeCall& call, int64_t begin, int64_t end) {
  std::vector<Share> shares(static_cast<size_t>(call.message_count));
  for (int64_t index = begin; index < end; ++index) {
    const Place place = place_of(call.parts, index);
    const float mean_scale = find_shares<several, Codec::kBits>(call, place, shares);
    for (int64_t i = 0; i < place.count; i += kTile) {
      const int64_t offset = i * Codec::kBits / 8;
      const int64_t count = std::min(kTile, place.count - i);
      const bool is_whole = count == kTile;
      Tile tile = is_whole ? sum_tile(codec, shares, offset)
                           : sum_part_of_tile(codec, shares, offset, count);
      if constexpr (several == Several::kMajority) {
        for (float& number : tile.numbers) {
          number = codecs::clamp(number, 1.0f) * mean_scale;
        }
      }
      const int64_t first = place.first + i;
      T* const values = static_cast<T*>(call.values) + first;
      T* const kept = call.kept == nullptr ? nullptr : static_cast<T*>(call.kept) + first;
      if (is_whole) {  // a constant, for which copying is a few instructions
        store_tile(tile, values, kept, kTile);
      } else {
        store_tile(tile, values, kept, count);
      }
    }
  }
}

template <typename Codec>
COMMHOOKS_INLINE void encode_blocks(
    const Codec& codec, const EncodeCall& call, int64_t begin, int64_t end) {
  if (call.is_double) {
    encode_blocks<Codec, double>(codec, call, begin, end);
  } else {
    encode_blocks<Codec, float>(codec, call, begin, end);
  }
}

template <typename Codec, Several several = Several::kMean>
COMMHOOKS_INLINE void decode_blocks(
    const Codec& codec, const DecodeCall& call, int64_t begin, int64_t end) {
  if (call.is_double) {
    decode_blocks<several, Codec, double>(codec, call, begin, end);
  } else {
    decode_blocks<several, Codec, float>(codec, call, begin, end);
  }
}

}  // namespace commhooks
