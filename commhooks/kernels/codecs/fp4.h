// 4-bit floating point, e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, with a scale of 8
// bits per group of numbers.
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

struct Fp4 {
  static constexpr int kBits = 4;
  static constexpr Norm norm = Norm::kLargest;
  using Format = SmallFloat<4, 1, 1>;

  // Larger numbers become 6. They are compared as integers, which compilers vectorize.
  COMMHOOKS_HD u32 code(float ratio, Random /*random*/, u32 /*index*/) const {
    const u32 magnitude = magnitude_bits(ratio);
    const u32 clamped = select(magnitude < bits_of(6.0f), magnitude, bits_of(6.0f));
    return Format::encode(float_of(clamped | (bits_of(ratio) & 0x80000000u)));
  }

  COMMHOOKS_HD float value(u32 code) const {
    return Format::decode(code);
  }
};

struct Mxfp4 : Fp4 {
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

struct Nvfp4 : Fp4 {
  static constexpr int kGroup = 16;

  COMMHOOKS_HD float scale(float largest, float /*norm*/) const {
    return largest / (6.0f * 448.0f);
  }

  COMMHOOKS_HD u32 group_code(float largest) const {
    return SmallFloat<8, 3, 7>::encode(largest * (1.0f / 6.0f));
  }

  COMMHOOKS_HD float group_scale(u32 code) const {
    return SmallFloat<8, 3, 7>::decode(code);
  }
};

// Returns what the numbers of a group are multiplied by before they are encoded.
COMMHOOKS_HD float group_inverse(float inverse, float group_scale) {
  return inverse / float_of(select(group_scale == 0.0f, bits_of(1.0f), bits_of(group_scale)));
}

}  // namespace commhooks::codecs
