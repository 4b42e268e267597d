// 4-bit floating point. E3M0, as Streaming DiLoCo sends it: 0, 0.25, 0.5, 1, 2, 4, 8, 16 and their
// negatives. MXFP4 and NVFP4 are E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, with a scale
// of 8 bits per group of numbers.
//
//                group  scale of a group  scale of a block
//     MXFP4        32   a power of two    1                  (OCP Microscaling Formats, 1.0)
//     NVFP4        16   e4m3              largest / (6 * 448)
//
// NVFP4 has one float32 scale per tensor. Here each block has one, so that one pass over the memory
// is enough.
#pragma once

#include "codecs/small_float.h"

namespace commhooks::codecs {

using E3M0 = BlockFloat<E3M0Format>;

struct GroupedE2M1 {
  using Format = E2M1Format;
  static constexpr int kBits = Format::kBits;
  static constexpr Norm norm = Norm::kLargest;

  // Larger numbers become the largest. The numbers are 1/2 apart up to 2, then 1 apart up to 4,
  // then 2 apart: 2m, m + 2 and m / 2 + 4 are their codes there, and larger elsewhere. 2^23 plus a
  // number is rounded to an integer, ties to even, and ends with its bits; 2 and 4
  // are even, so adding them before does not change how a tie is rounded.
  COMMHOOKS_HD u32 code(float ratio, Random /*random*/, u32 /*index*/) const {
    constexpr float anchor = 0x1p23f;
    const float magnitude = float_of(magnitude_bits(ratio));
    const float low = magnitude * 2.0f + anchor;
    const float middle = magnitude + (anchor + 2.0f);
    const float high = magnitude * 0.5f + (anchor + 4.0f);
    const float above = smaller(smaller(middle, high), anchor + 7.0f);
    return (bits_of(smaller(low, above)) & 7u) | ((bits_of(ratio) >> 28) & 8u);
  }

  COMMHOOKS_HD float value(u32 code) const {
    return Format::decode(code);
  }

 private:
  static COMMHOOKS_HD float smaller(float one, float other) {
    return one < other ? one : other;
  }
};

struct Mxfp4 : GroupedE2M1 {
  static constexpr int kGroup = 32;

  COMMHOOKS_HD float scale(float /*largest*/, float /*norm*/) const {
    return 1.0f;
  }

  // Returns an exponent, biased by 127: that of the largest number minus that of 6, as in the
  // specification, section 6.3. So numbers above 6 scales, up to 8, become 6.
  COMMHOOKS_HD u32 group_code(float largest) const {
    const u32 exponent = bits_of(largest) >> 23;
    return exponent < 3 ? 1 : exponent - 2;
  }

  COMMHOOKS_HD float group_scale(u32 code) const {
    return float_of(code << 23);
  }
};

struct Nvfp4 : GroupedE2M1 {
  using GroupFormat = E4M3Format;
  static constexpr int kGroup = 16;

  COMMHOOKS_HD float scale(float largest, float /*norm*/) const {
    return largest / (Format::kLargest * GroupFormat::kLargest);
  }

  COMMHOOKS_HD u32 group_code(float largest) const {
    return GroupFormat::encode(largest * (1.0f / Format::kLargest));
  }

  COMMHOOKS_HD float group_scale(u32 code) const {
    return GroupFormat::decode(code);
  }
};

// Returns what the numbers of a group are multiplied by before they are encoded.
COMMHOOKS_HD float group_inverse(float inverse, float group_scale) {
  return inverse / float_of(select(group_scale == 0.0f, bits_of(1.0f), bits_of(group_scale)));
}

}  // namespace commhooks::codecs
