// The loop that decodes blocks and averages several messages, for any codec.
#pragma once

#include "codecs/blocks.h"
#include "codecs/half_codes.h"

#include <type_traits>
#include <vector>

namespace commhooks {

// The distance at which codes are prefetched, in bytes. There are as many messages as ranks, more
// streams than the CPU prefetches by itself.
constexpr int64_t kCodesAhead = 320;

struct alignas(64) Tile {
  float numbers[kTile];
};

// Sums value(code) * weight for the numbers of a tile, one message after the other; the sums stay
// in registers. Each kSpan numbers have a weight.
template <typename Set, typename Codec>
class TileSum {
 public:
  static constexpr int kSpan = Codec::kGroup == 0 ? kTile : Codec::kGroup;

  COMMHOOKS_INLINE explicit TileSum(const Codec& codec) : codec_(codec) {
    for (Floats& sum : sums_) {
      sum = -Floats{};  // -0 plus x is x, even for -0
    }
    if constexpr (kLooksUp) {
      for (uint32_t code = 0; code < 16; ++code) {
        tables_[code / kLanes][code % kLanes] = codec.value(code & kMask);
      }
    }
  }

  COMMHOOKS_INLINE void add(const uint8_t* packed, const float* weights) {
    if constexpr (kLooksUp) {
      look_up(packed, weights);
    } else if constexpr (kWidens) {
      if (are_halves(codec_, packed)) {
        widen(packed, weights[0]);
      } else {
        compute(packed, weights);
      }
    } else {
      compute(packed, weights);
    }
  }

  COMMHOOKS_INLINE Tile total() const {
    return load<Tile>(sums_);
  }

 private:
  static constexpr int kLanes = Set::kFloats;
  static constexpr int kBits = Codec::kBits;
  static constexpr uint32_t kMask = (1u << kBits) - 1;
  // Codes of at most four bits: a table in one or two registers, indexed by the lowest four bits of
  // each lane with one instruction per vector. The table repeats itself if codes have fewer bits.
  static constexpr bool kLooksUp = kBits <= 4 && kLanes >= 8;
  static constexpr int kTables = 16 / kLanes;
  // Codes of fp8, if the CPU has an instruction that converts halves.
  static constexpr bool kWidens =
      kLanes >= 8 && (std::is_same_v<Codec, codecs::E4M3> || std::is_same_v<Codec, codecs::E5M2>);

  using Floats = typename Vectors<Set>::Floats;
  using Words = typename Vectors<Set>::Words;
  using Ints = typename Vectors<Set>::Ints;

  COMMHOOKS_INLINE void look_up(const uint8_t* packed, const float* weights) {
    for (int64_t span = 0; span < kTile / kSpan; ++span) {
      Floats tables[kTables];
      for (int64_t i = 0; i < kTables; ++i) {
        tables[i] = tables_[i] * weights[span];
      }
      for (int64_t i = span * kSpan / kLanes; i < (span + 1) * kSpan / kLanes; ++i) {
        const auto codes = reinterpret_cast<Ints>(codes_of(packed, i));
        sums_[i] += __builtin_shuffle(tables[0], tables[kTables - 1], codes);
      }
    }
  }

  // Returns the codes of vector i in the lowest bits of its lanes; the bits above are later codes.
  COMMHOOKS_INLINE static Words codes_of(const uint8_t* packed, int64_t i) {
    constexpr int per_word = 32 / kBits;
    const uint8_t* const from = packed + i * kLanes / per_word * 4;
    Words words = Words{} + load<uint32_t>(from);
    if constexpr (kLanes > per_word) {  // twice as many
      const Words others = Words{} + load<uint32_t>(from + 4);
      const auto is_first = for_lanes<Words>([](int lane) { return lane < per_word ? ~0u : 0u; });
      words = (words & is_first) | (others & ~is_first);
    }
    const auto shifts =
        for_lanes<Words>([](int lane) { return static_cast<uint32_t>(lane % per_word * kBits); });
    return words >> (shifts + static_cast<uint32_t>(i * kLanes % per_word * kBits));
  }

  COMMHOOKS_INLINE void widen(const uint8_t* packed, float weight) {
    for (int64_t i = 0; i < kTile / kLanes; ++i) {
      sums_[i] += widened(Set(), codec_, packed + i * kLanes) * weight;
    }
  }

  COMMHOOKS_INLINE void compute(const uint8_t* packed, const float* weights) {
    uint32_t codes[kTile];  // as wide as the numbers; otherwise compilers compute in bytes and then
                            // widen
    for (int64_t i = 0; i < kTile * kBits / 8; ++i) {
      for (int64_t k = 0; k < 8 / kBits; ++k) {
        codes[i * (8 / kBits) + k] = (packed[i] >> (k * kBits)) & kMask;
      }
    }
    Tile tile;
    for (int64_t i = 0; i < kTile; ++i) {
      tile.numbers[i] = codec_.value(codes[i]);
    }
#pragma GCC unroll 16  // otherwise sums are in memory, and each message waits for the one before
    for (int64_t i = 0; i < kTile / kLanes; ++i) {
      sums_[i] += load<Floats>(tile.numbers + kLanes * i) * weights[i * kLanes / kSpan];
    }
  }

  Codec codec_;
  Floats tables_[kTables];
  Floats sums_[kTile / kLanes];
};

// How several messages are combined: by their mean, or by a vote on the sign.
enum class Combine { kMean, kVote };

// The share of one message in a block: its codes, and the weights of its numbers. Codecs with
// groups have one weight per group, others a single one.
template <typename Codec>
struct Share {
  static constexpr int64_t kMaxGroups =
      Codec::kGroup == 0 ? 1 : kMaxBlockSize / std::max(1, Codec::kGroup);
  const uint8_t* codes;
  float weights[kMaxGroups];

  const float* weights_from(int64_t number) const {
    return Codec::kGroup == 0 ? weights : weights + number / std::max(1, Codec::kGroup);
  }
};

// Finds the weights of the first `count` groups of a block; those up to the end of a tile are
// zeros.
template <typename Codec>
COMMHOOKS_INLINE void weigh_groups(
    const Codec& codec,
    const uint8_t* __restrict codes,
    int64_t count,
    float weight,
    float* __restrict weights) {
  for (int64_t i = 0; i < count; ++i) {
    weights[i] = codec.group_scale(codes[i]) * weight;
  }
  constexpr int64_t per_tile = kTile / Codec::kGroup;
  std::fill(weights + count, weights + (count + per_tile - 1) / per_tile * per_tile, 0.0f);
}

// Finds the shares of all messages of the block's part. Returns the mean of their scales.
template <Combine combine, typename Codec>
COMMHOOKS_INLINE float find_shares(
    const Codec& codec,
    const DecodeCall& call,
    const Place& place,
    std::vector<Share<Codec>>& shares) {
  const int64_t code_bytes = call.parts.block_size * Codec::kBits / 8;
  const float of_each = 1.0f / static_cast<float>(call.message_count);
  const uint8_t* message = call.messages + place.part * call.message_count * call.message_bytes;
  float mean_scale = 0.0f;
  for (Share<Codec>& own : shares) {
    const auto scale = load<float>(message + 4 * place.block);
    own.codes = message + call.parts.codes_offset(Codec::kGroup) + place.block * code_bytes;
    if constexpr (Codec::kGroup > 0) {
      const int64_t block_groups = call.parts.block_size / Codec::kGroup;
      const uint8_t* const groups =
          message + call.parts.groups_offset() + place.block * block_groups;
      const int64_t count = (place.count + Codec::kGroup - 1) / Codec::kGroup;
      weigh_groups(codec, groups, count, scale * of_each, own.weights);
    } else if constexpr (combine == Combine::kVote) {
      own.weights[0] = scale == 0.0f ? 0.0f : 1.0f;
    } else {
      own.weights[0] = scale * of_each;
    }
    mean_scale += scale * of_each;
    prefetch(own.codes + kCodesAhead, code_bytes);
    message += call.message_bytes;
  }
  return mean_scale;
}

// Decodes `count` numbers of a block from number `at` on. If they are not a whole tile, they are
// the last ones, and nothing is read after their codes.
template <typename Set, bool is_whole, typename Codec>
COMMHOOKS_INLINE Tile
sum_tile(const Codec& codec, const std::vector<Share<Codec>>& shares, int64_t at, int64_t count) {
  TileSum<Set, Codec> sum(codec);
  for (const Share<Codec>& share : shares) {
    const uint8_t* codes = share.codes + at * Codec::kBits / 8;
    uint8_t room[kTile] = {};
    if constexpr (!is_whole) {
      std::memcpy(room, codes, static_cast<size_t>((count * Codec::kBits + 7) / 8));
      codes = room;
    }
    sum.add(codes, share.weights_from(at));
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

template <typename Set, typename T, Combine combine, typename Codec>
COMMHOOKS_INLINE void decode_blocks(
    const Codec& codec, const DecodeCall& call, int64_t begin, int64_t end) {
  std::vector<Share<Codec>> shares(static_cast<size_t>(call.message_count));
  for (int64_t index = begin; index < end; ++index) {
    const Place place = place_of(call.parts, index);
    const float mean_scale = find_shares<combine>(codec, call, place, shares);
    for (int64_t i = 0; i < place.count; i += kTile) {
      const int64_t count = std::min(kTile, place.count - i);
      const bool is_whole = count == kTile;
      Tile tile = is_whole ? sum_tile<Set, true>(codec, shares, i, count)
                           : sum_tile<Set, false>(codec, shares, i, count);
      if constexpr (combine == Combine::kVote) {
        // Two loops, as compilers generate a branch per element for one.
        for (float& number : tile.numbers) {
          number = codecs::clamp(number, 1.0f);
        }
        for (float& number : tile.numbers) {
          number *= mean_scale;
        }
      }
      const int64_t first = place.first + i;
      T* const values = static_cast<T*>(call.values) + first;
      T* const kept = call.kept == nullptr ? nullptr : static_cast<T*>(call.kept) + first;
      if (is_whole) {  // a constant size, which is copied with a few instructions
        store_tile(tile, values, kept, kTile);
      } else {
        store_tile(tile, values, kept, count);
      }
    }
  }
}

}  // namespace commhooks
