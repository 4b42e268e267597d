// The loops over blocks, for any codec of commhooks/kernels/codecs. A block is read from memory once and written
// once; all passes in between are over buffers that stay in the first-level cache.
#pragma once

#include "codecs/block.h"
#include "cpu/block_codec.h"
#include "cpu/multiversion.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace commhooks {

constexpr int64_t kMaxBlockSize = 4096;
// How many elements ahead of its use memory is asked for.
constexpr int64_t kAhead = 1024;

// Up to whole vectors of codes: loops over scratch memory need no remainder, which costs as much as
// the loop where blocks are small.
COMMHOOKS_INLINE int64_t pad(int64_t count) {
  return (count + 63) / 64 * 64;
}

inline float load_float(const uint8_t* from) {
  float value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline void store_float(uint8_t* to, float value) {
  std::memcpy(to, &value, sizeof(value));
}

// Spreads a seed over all its bits and mixes in the high bits of an index.
inline codecs::Random random_for(uint64_t seed, int64_t first) {
  return codecs::Random(seed + (static_cast<uint64_t>(first) >> 32) * 0x9e3779b97f4a7c15u);
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

// The sum of |y| / largest, or of its square: sizes that neither overflow nor vanish. In one fixed
// order, by lanes and then by eights, so that few roundings meet in a number. y is padded with zeros
// to a multiple of kPadding.
constexpr int64_t kPadding = 8 * kLanes;
template <bool squares>
COMMHOOKS_INLINE double sum_of_ratios(const float* y, int64_t count, float largest) {
  const float inverse = 1.0f / largest;
  Lanes totals = {};
  for (int64_t i = 0; i < count; i += kPadding) {
    Lanes sums = {};
    for (int64_t j = i; j < i + kPadding; j += kLanes) {
      Lanes ratios;
      std::memcpy(&ratios, y + j, sizeof(ratios));
      ratios *= inverse;
      sums += squares ? ratios * ratios : (ratios < 0 ? -ratios : ratios);
    }
    totals += sums;
  }
  double total = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    total += totals[lane];
  }
  return total;
}

COMMHOOKS_INLINE float norm_of(codecs::Norm norm, const float* y, int64_t count, float largest) {
  const auto size = static_cast<double>(largest);
  const auto terms = static_cast<double>(count);
  switch (norm) {
    case codecs::Norm::kMean:
      return static_cast<float>(size * (sum_of_ratios<false>(y, count, largest) / terms));
    case codecs::Norm::kRootMean:
      return static_cast<float>(size * std::sqrt(sum_of_ratios<true>(y, count, largest) / terms));
    case codecs::Norm::kEuclidean:
      return static_cast<float>(size * std::sqrt(sum_of_ratios<true>(y, count, largest)));
    default:
      return largest;
  }
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

// The reverse; writes whole bytes' worth of codes.
template <int bits>
COMMHOOKS_INLINE void unpack(const uint8_t* packed, uint8_t* codes, int64_t count) {
  const int64_t bytes = (count * bits + 7) / 8;
  for (int64_t i = 0; i < bytes; ++i) {
    if constexpr (bits == 1) {
      // Byte k keeps bit k of the copy that the product puts there, which then becomes 0 or 1.
      const uint64_t kept = (packed[i] * 0x0101010101010101u) & 0x8040201008040201u;
      const uint64_t eight = ((kept + 0x7f7f7f7f7f7f7f7fu) >> 7) & 0x0101010101010101u;
      std::memcpy(codes + 8 * i, &eight, sizeof(eight));
    } else if constexpr (bits == 2) {
      const uint32_t byte = packed[i];
      const uint32_t four =
          (byte | (byte << 6) | (byte << 12) | (byte << 18)) & uint32_t{0x03030303};
      std::memcpy(codes + 4 * i, &four, sizeof(four));
    } else if constexpr (bits == 4) {
      const uint32_t byte = packed[i];
      const auto two = static_cast<uint16_t>((byte | (byte << 4)) & 0x0f0fu);
      std::memcpy(codes + 2 * i, &two, sizeof(two));
    } else {
      codes[i] = packed[i];
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
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * call.block_size;
    const int64_t count = std::min(call.block_size, call.numel - first);
    T* __restrict const values = static_cast<T*>(call.values) + first;
    const T* __restrict const error =
        call.error == nullptr ? nullptr : static_cast<const T*>(call.error) + first;
    prefetch(values + kAhead, count);
    if (error != nullptr) {
      prefetch(error + kAhead, count);
    }
    const uint32_t largest = load_sums(values, error, y, count);
    std::fill(y + count, y + (count + kPadding - 1) / kPadding * kPadding, 0.0f);

    uint8_t* const packed = call.codes + block * (call.block_size * Codec::kBits / 8);
    const bool has_scale = codecs::has_scale(largest);
    float scale = codecs::scale_without(largest);
    if (has_scale) {
      const float size = codecs::float_of(largest);
      scale = codec.scale(size, norm_of(codec.norm, y, count, size));
      const float inverse = 1.0f / scale;
      const codecs::Random random = random_for(call.seed, first);
      const auto index = static_cast<uint32_t>(first);
      const auto padded = static_cast<int32_t>(pad(count));
      for (int32_t i = 0; i < padded; ++i) {  // an index as wide as the numbers
        codes[i] = static_cast<uint8_t>(
            codec.code(y[i] * inverse, random, index + static_cast<uint32_t>(i)));
      }
      std::fill(codes + count, codes + (count + 7) / 8 * 8, uint8_t{0});
      pack<Codec::kBits>(codes, packed, count);
    } else {
      std::memset(packed, 0, static_cast<size_t>((count * Codec::kBits + 7) / 8));
    }
    store_float(call.scales + 4 * block, scale);

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

// Whether several messages are averaged, or vote on the sign.
enum class Several { kMean, kMajority };

template <Several several, typename Codec, typename T>
COMMHOOKS_INLINE void decode_blocks(
    const Codec& codec, const DecodeCall& call, int64_t begin, int64_t end) {
  alignas(64) float sums[kMaxBlockSize];
  alignas(64) uint8_t codes[kMaxBlockSize + 8] = {};
  const float share = 1.0f / static_cast<float>(call.message_count);
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * call.block_size;
    const int64_t count = std::min(call.block_size, call.numel - first);
    const int64_t padded = pad(count);
    float mean_scale = 0.0f;
    for (int64_t k = 0; k < call.message_count; ++k) {
      const uint8_t* const message = call.messages + k * call.message_stride;
      const uint8_t* const packed =
          message + call.codes_offset + block * (call.block_size * Codec::kBits / 8);
      unpack<Codec::kBits>(packed, codes, count);
      const float scale = load_float(message + 4 * block);
      mean_scale += scale * share;
      const bool is_vote = several == Several::kMajority;
      const float weight = is_vote ? (scale == 0.0f ? 0.0f : 1.0f) : scale * share;
      if (k == 0) {
        for (int64_t i = 0; i < padded; ++i) {
          sums[i] = codec.value(codes[i]) * weight;
        }
      } else {
        for (int64_t i = 0; i < padded; ++i) {
          sums[i] += codec.value(codes[i]) * weight;
        }
      }
    }
    if constexpr (several == Several::kMajority) {
      for (int64_t i = 0; i < padded; ++i) {
        sums[i] = codecs::clamp(sums[i], 1.0f) * mean_scale;
      }
    }
    T* __restrict const values = static_cast<T*>(call.values) + first;
    if (call.kept != nullptr) {
      T* __restrict const kept = static_cast<T*>(call.kept) + first;
      std::copy(values, values + count, kept);
    }
    for (int64_t i = 0; i < count; ++i) {
      values[i] = static_cast<T>(sums[i]);
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
