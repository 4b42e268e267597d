// The loop that encodes blocks, for any codec.
//
// It handles a few blocks at a time: a scale takes a sum, a root and two divisions, and each waits
// for the one before. The scales of several blocks are computed as vectors, and overlap.
#pragma once

#include "codecs/block_sums.h"
#include "codecs/blocks.h"
#include "codecs/encode_groups.h"
#include "codecs/sign_bits.h"
#include "kernels/codecs/formats.h"

#include <type_traits>

namespace commhooks {

// The least number of elements that are encoded at a time. Values, errors and codes of this batch,
// and what is prefetched of the next, should fit in a first-level cache of 32 KiB.
constexpr int64_t kBatchNumbers = 1024;

// Scratch memory for several blocks.
struct BlockBatch {
  explicit BlockBatch(int64_t block_size)
      : spacing(
            static_cast<int64_t>(
                std::bit_ceil(static_cast<uint64_t>(std::max(block_size, kTile))))),
        max_blocks(std::clamp<int64_t>(kBatchNumbers / spacing, 1, kMaxBlocks)) {}

  const int64_t spacing;  // of blocks in y
  const int64_t max_blocks;
  int64_t blocks = 0;
  Place places[kMaxBlocks];
  uint32_t largest[kMaxBlocks] = {};  // the bits of the largest |y|
  int counts[kMaxBlocks] = {};
  alignas(64) float norms[kMaxBlocks];
  alignas(64) float scales[kMaxBlocks];
  alignas(64) float inverses[kMaxBlocks];
  alignas(64) float y[kMaxBlockSize];  // the numbers to encode, with zeros after each block
};

// Sets y to values + error, or to values if there is no error; returns the bits of the largest |y|.
template <typename T>
COMMHOOKS_INLINE uint32_t load_sums(
    const T* __restrict values, const T* __restrict error, float* __restrict y, int64_t count) {
  int32_t largest = 0;  // signed, as there is an instruction for the maximum of signed numbers
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

template <typename T>
COMMHOOKS_INLINE void load_batch(const EncodeCall& call, int64_t begin, BlockBatch& batch) {
  for (int64_t i = 0; i < batch.blocks; ++i) {
    Place& place = batch.places[i];
    place = place_of(call.parts, begin + i);
    const T* const values = static_cast<const T*>(call.values) + place.first;
    const T* const error =
        call.error == nullptr ? nullptr : static_cast<const T*>(call.error) + place.first;
    float* const y = batch.y + i * batch.spacing;
    batch.counts[i] = static_cast<int>(place.count);
    batch.largest[i] = load_sums(values, error, y, place.count);
    if (place.count < batch.spacing) {
      std::fill(y + place.count, y + batch.spacing, 0.0f);
    }
  }
}

// Returns the bits of the number with the largest magnitude, whose bits are `largest`; the positive
// one, if there are both. Without branches, as signs cannot be predicted.
COMMHOOKS_INLINE uint32_t signed_largest(const float* y, int64_t count, uint32_t largest) {
  uint32_t is_there = 0;
  for (int64_t i = 0; i < count; i += kTile) {
    for (int64_t k = 0; k < kTile; ++k) {
      is_there |= codecs::bits_of(y[i + k]) == largest ? 1u : 0u;
    }
  }
  return largest | ((is_there ^ 1u) << 31);
}

// The loops over kMaxBlocks are vectorized; results for blocks that the batch does not have are
// not used.
template <typename Set, codecs::Norm norm>
COMMHOOKS_INLINE void find_norms(BlockBatch& batch) {
  if constexpr (norm == codecs::Norm::kLargest) {
    std::memcpy(batch.norms, batch.largest, sizeof(batch.norms));
  } else if constexpr (norm == codecs::Norm::kSigned) {
    for (int64_t i = 0; i < batch.blocks; ++i) {
      batch.norms[i] = codecs::float_of(
          signed_largest(batch.y + i * batch.spacing, batch.spacing, batch.largest[i]));
    }
  } else {
    alignas(64) float inverses[kMaxBlocks];
    alignas(64) float sums[kMaxBlocks] = {};
    for (int64_t i = 0; i < kMaxBlocks; ++i) {
      inverses[i] = 1.0f / codecs::float_of(batch.largest[i]);
    }
    sum_blocks<Set, codecs::sums_squares(norm)>(
        batch.y, batch.spacing, batch.blocks, inverses, sums);
    for (int64_t i = 0; i < kMaxBlocks; ++i) {
      batch.norms[i] =
          codecs::norm_from(norm, codecs::float_of(batch.largest[i]), sums[i], batch.counts[i]);
    }
  }
}

template <typename Set, typename Codec>
COMMHOOKS_INLINE void find_scales(const Codec& codec, BlockBatch& batch) {
  switch (codec.norm) {
    case codecs::Norm::kLargest:
      find_norms<Set, codecs::Norm::kLargest>(batch);
      break;
    case codecs::Norm::kSigned:
      find_norms<Set, codecs::Norm::kSigned>(batch);
      break;
    case codecs::Norm::kMean:
      find_norms<Set, codecs::Norm::kMean>(batch);
      break;
    case codecs::Norm::kRootMean:
      find_norms<Set, codecs::Norm::kRootMean>(batch);
      break;
    case codecs::Norm::kEuclidean:
      find_norms<Set, codecs::Norm::kEuclidean>(batch);
      break;
  }
  for (int64_t i = 0; i < kMaxBlocks; ++i) {
    batch.scales[i] = codec.scale(codecs::float_of(batch.largest[i]), batch.norms[i]);
    batch.inverses[i] = 1.0f / batch.scales[i];
  }
}

// Packs the codes of a tile, one per byte, into `bits` bits each, lowest bits first.
template <int bits>
COMMHOOKS_INLINE void pack_tile(const uint8_t* __restrict codes, uint8_t* __restrict packed) {
  for (int64_t i = 0; i < kTile * bits / 8; ++i) {
    if constexpr (bits == 1) {
      // The product moves bit 0 of byte k to bit 56 + k.
      const auto eight = load<uint64_t>(codes + 8 * i);
      packed[i] = static_cast<uint8_t>((eight * 0x0102040810204080u) >> 56);
    } else if constexpr (bits == 2) {
      const auto four = load<uint32_t>(codes + 4 * i);
      packed[i] = static_cast<uint8_t>(four | (four >> 6) | (four >> 12) | (four >> 18));
    } else if constexpr (bits == 4) {
      const auto two = load<uint16_t>(codes + 2 * i);
      packed[i] = static_cast<uint8_t>(two | (two >> 4));
    } else {
      packed[i] = codes[i];
    }
  }
}

// `codes` has space for whole tiles, with zeros after the last code.
template <int bits>
COMMHOOKS_INLINE void pack(const uint8_t* codes, uint8_t* packed, int64_t count) {
  for (; count >= kTile; count -= kTile) {
    pack_tile<bits>(codes, packed);
    codes += kTile;
    packed += kTile * bits / 8;
  }
  if (count > 0) {
    uint8_t last[kTile];
    pack_tile<bits>(codes, last);
    std::memcpy(packed, last, static_cast<size_t>((count * bits + 7) / 8));
  }
}

// Computes the codes, one per byte, followed by zeros up to whole tiles.
template <typename Codec>
COMMHOOKS_INLINE void find_codes(
    const Codec& codec,
    const float* __restrict y,
    float inverse,
    uint64_t seed,
    const Place& place,
    uint8_t* __restrict codes) {
  const codecs::Random random = codecs::random_for(seed, static_cast<uint64_t>(place.first));
  const auto first = static_cast<uint32_t>(place.first);
  const auto padded = static_cast<int32_t>((place.count + kTile - 1) / kTile * kTile);
  for (int32_t i = 0; i < padded; ++i) {  // the index has the width of the numbers
    codes[i] =
        static_cast<uint8_t>(codec.code(y[i] * inverse, random, first + static_cast<uint32_t>(i)));
  }
  if (place.count < padded) {
    std::fill(codes + place.count, codes + padded, uint8_t{0});
  }
}

// Writes bytes to a message that has room for `room` of them, followed by zeros.
COMMHOOKS_INLINE void write_bytes(uint8_t* to, const uint8_t* bytes, int64_t count, int64_t room) {
  std::memcpy(to, bytes, static_cast<size_t>(count));
  std::memset(to + count, 0, static_cast<size_t>(room - count));
}

// Writes block i of the batch to the message of its part, and its residual to values.
template <typename Set, typename Codec, typename T>
COMMHOOKS_INLINE void write_block(
    const Codec& codec, const EncodeCall& call, BlockBatch& batch, int64_t i) {
  const auto& [part, block, first, count] = batch.places[i];
  uint8_t* const message = call.messages + part * call.message_bytes;
  const int64_t code_bytes = call.parts.block_size * Codec::kBits / 8;
  const int64_t codes_begin = call.parts.codes_offset(Codec::kGroup) + block * code_bytes;
  uint8_t* const packed = message + codes_begin;
  // The codes of the elements of the part, followed by zeros.
  const int64_t packed_bytes = (count * Codec::kBits + 7) / 8;
  const int64_t room = std::min(code_bytes, call.message_bytes - codes_begin);
  if (packed_bytes < room) {
    std::memset(packed + packed_bytes, 0, static_cast<size_t>(room - packed_bytes));
  }
  T* __restrict const values = static_cast<T*>(call.values) + first;
  const T* __restrict const error =
      call.error == nullptr ? nullptr : static_cast<const T*>(call.error) + first;
  const int64_t ahead = batch.max_blocks * batch.spacing;
  prefetch(values + ahead, count);
  if (error != nullptr) {
    prefetch(error + ahead, count);
  }
  const bool has_scale = codecs::has_scale(batch.largest[i]);
  const float scale = has_scale ? batch.scales[i] : codecs::scale_without(batch.largest[i]);
  store(message + 4 * block, scale);
  float* __restrict const y = batch.y + i * batch.spacing;
  const float inverse = batch.inverses[i];
  // Whether the codes are the signs of y and have been packed already.
  const bool are_signs = std::is_same_v<Codec, codecs::Sign> && has_scale &&
      count % Set::kFloats == 0 && pack_signs(Set(), y, inverse, count, packed);
  alignas(64) uint8_t codes[kMaxBlockSize];
  [[maybe_unused]] std::conditional_t<Codec::kGroup == 0, int, Groups<std::max(1, Codec::kGroup)>>
      groups;
  if constexpr (Codec::kGroup > 0) {
    const int64_t block_groups = call.parts.block_size / Codec::kGroup;
    const int64_t begin = call.parts.groups_offset() + block * block_groups;
    const int64_t groups_room =
        std::min(block_groups, call.parts.codes_offset(Codec::kGroup) - begin);
    const int64_t used = has_scale ? (count + Codec::kGroup - 1) / Codec::kGroup : 0;
    if (has_scale) {
      scale_groups<Set>(codec, y, inverse, scale, count, groups);
    }
    write_bytes(message + begin, groups.codes, used, groups_room);
  }
  if (!has_scale) {
    std::memset(packed, 0, static_cast<size_t>(packed_bytes));
  } else if (!are_signs) {
    find_codes(codec, y, Codec::kGroup > 0 ? 1.0f : inverse, call.seed, batch.places[i], codes);
    pack<Codec::kBits>(codes, packed, count);
  }

  if (!call.keep_residual) {
    return;
  }
  if (error != nullptr) {
    for (int64_t k = 0; k < count; ++k) {
      values[k] += error[k];
    }
  }
  if (are_signs) {
    for (int64_t k = 0; k < count; ++k) {
      values[k] -= static_cast<T>(codec.value(codecs::bits_of(y[k]) >> 31) * scale);
    }
  } else if constexpr (Codec::kGroup > 0) {
    if (has_scale) {
      subtract_groups<Set>(codec, groups, codes, count, y, values);
    }
  } else if (has_scale) {
    for (int64_t k = 0; k < count; ++k) {
      values[k] -= static_cast<T>(codec.value(codes[k]) * scale);
    }
  }
}

template <typename Set, typename T, typename Codec>
COMMHOOKS_INLINE void encode_blocks(
    const Codec& codec, const EncodeCall& call, int64_t begin, int64_t end) {
  BlockBatch batch(call.parts.block_size);
  for (; begin < end; begin += batch.blocks) {
    batch.blocks = std::min(batch.max_blocks, end - begin);
    load_batch<T>(call, begin, batch);
    find_scales<Set>(codec, batch);
    for (int64_t i = 0; i < batch.blocks; ++i) {
      write_block<Set, Codec, T>(codec, call, batch, i);
    }
  }
}

}  // namespace commhooks
