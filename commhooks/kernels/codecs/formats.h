// The formats: the arithmetic of each as a struct, and their list at the end, from which the loops
// on the CPU and the CUDA kernels are compiled. commhooks/codecs/formats.py says what each is for.
#pragma once

#include "codecs/block.h"

namespace commhooks::codecs {

// ------------------------------------------------------------------------------------------ floats

// Floating point numbers of at most 8 bits, times the scale of their block: a sign, an exponent and
// a mantissa, with subnormal numbers. The scale maps the largest number of the block to the largest
// number of the format, so overflow and the codes of infinity and NaN do not occur. E4M3 and E5M2
// are those of Micikevicius et al. 2022, "FP8 formats for deep learning".
template <int bits, int mantissa, int bias, int largest_number>
struct BlockFloat {
  static constexpr int kBits = bits;
  static constexpr int kGroup = 0;
  static constexpr float kLargest = largest_number;
  static constexpr Norm norm = Norm::kLargest;

  COMMHOOKS_HD float scale(float largest, float /*norm*/) const {
    return largest / kLargest;
  }

  COMMHOOKS_HD u32 code(float ratio, Random /*random*/, u32 /*index*/) const {
    return encode(ratio);
  }

  // Rounds to nearest even. The magnitude must not round to more than the largest number.
  static COMMHOOKS_HD u32 encode(float number) {
    const u32 magnitude = magnitude_bits(number);
    const u32 is_odd = (magnitude >> kShift) & 1;
    const u32 normal = (magnitude - kRebias + (1u << (kShift - 1)) - 1 + is_odd) >> kShift;
    // The lowest bit of the sum is that of subnormal numbers, so the addition rounds.
    const u32 subnormal = bits_of(float_of(magnitude) + kAnchor) - bits_of(kAnchor);
    const u32 sign = (bits_of(number) >> (32 - bits)) & kSign;
    return sign | select(magnitude < kSmallestNormal, subnormal, normal);
  }

  static COMMHOOKS_HD float value(u32 code) {
    const u32 magnitude = code & (kSign - 1);
    const u32 normal = (magnitude << kShift) + kRebias;
    const u32 subnormal = bits_of((float)(int)magnitude * kSmallest);
    const u32 size = select(magnitude < (1u << mantissa), subnormal, normal);
    return float_of(size | ((code & kSign) << (32 - bits)));
  }

 private:
  static constexpr u32 kSign = 1u << (bits - 1);
  static constexpr int kShift = 23 - mantissa;
  static constexpr u32 kRebias = (u32)(127 - bias) << 23;
  static constexpr u32 kSmallestNormal = (u32)(128 - bias) << 23;
  static COMMHOOKS_CONSTEXPR float power_of_two(int exponent) {
    return exponent < 0 ? power_of_two(exponent + 1) / 2
                        : (exponent > 0 ? power_of_two(exponent - 1) * 2 : 1.0f);
  }
  static constexpr float kSmallest = power_of_two(1 - bias - mantissa);
  static constexpr float kAnchor = kSmallest * 0x1p23f;
};

//              bits  sign  exponent  mantissa  bias  largest
//     e4m3        8     1         4         3     7      448   as torch.float8_e4m3fn: no infinity
//     e5m2        8     1         5         2    15    57344   as torch.float8_e5m2
//     e3m0        4     1         3         0     3       16
//     e2m1        4     1         2         1     1        6
using E4M3 = BlockFloat<8, 3, 7, 448>;
using E5M2 = BlockFloat<8, 2, 15, 57344>;
using E3M0 = BlockFloat<4, 0, 3, 16>;

// MXFP4 and NVFP4 are E2M1 with a scale of 8 bits per group of numbers.
//
//                group  scale of a group  scale of a block
//     MXFP4        32   a power of two    1                  (OCP Microscaling Formats, 1.0)
//     NVFP4        16   e4m3              largest / (6 * 448)
//
// NVFP4 has one float32 scale per tensor. Here each block has one, so that one pass over the memory
// is enough.
struct GroupedE2M1 : BlockFloat<4, 1, 1, 6> {
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
  static constexpr int kGroup = 16;

  COMMHOOKS_HD float scale(float largest, float /*norm*/) const {
    return largest / (kLargest * E4M3::kLargest);
  }

  COMMHOOKS_HD u32 group_code(float largest) const {
    return E4M3::encode(largest * (1.0f / kLargest));
  }

  COMMHOOKS_HD float group_scale(u32 code) const {
    return E4M3::value(code);
  }
};

// ---------------------------------------------------------------------------------- powers of two

// Natural compression: a sign and a power of two (Horvath et al. 2019, section 2).
//
// A number is rounded to the power of two above it with the probability that makes the mean exact.
// Exponents count down from the block's largest one, in 7 bits instead of the 8 of float32.
struct Natural {
  static constexpr int kBits = 8;
  static constexpr int kGroup = 0;
  static constexpr Norm norm = Norm::kLargest;

  // The power of two at or above the largest number.
  COMMHOOKS_HD float scale(float largest, float /*norm*/) const {
    return float_of((bits_of(largest) + kMantissa) & ~kMantissa);
  }

  // `ratio` is at most 1. The mantissa bits of a float are its distance from the power of two
  // below, relative to the distance between the two powers. Adding random bits to them carries into
  // the exponent with exactly that probability. The same holds for the subnormal numbers below
  // 2^-126, the smallest power.
  COMMHOOKS_HD u32 code(float ratio, Random random, u32 index) const {
    const u32 carried = magnitude_bits(ratio) + (random.bits(index) & kMantissa);
    return ((bits_of(ratio) >> 24) & 0x80u) | (carried >> 23);
  }

  COMMHOOKS_HD float value(u32 code) const {
    // The shift to the right leaves the sign, and a copy of it above the exponent.
    return float_of((u32)((int)(code << 24) >> 1) & ~0x40000000u);
  }

 private:
  static constexpr u32 kMantissa = 0x7fffffu;
};

// ------------------------------------------------------------------------------ integers and signs

// Evenly spaced levels: integers from -levels to levels, times the scale.
//
// With the largest number as the norm, this is block-wise integer quantization. With the Euclidean
// norm and stochastic rounding it is QSGD (Alistarh et al. 2017, section 3.1), and with one level
// TernGrad (Wen et al. 2017, section 3.1).
//
// With the norm kSigned, the lowest level is -levels - 1, so that all codes are used. The scale has
// a sign, which makes the number of the largest magnitude exactly this level. Numbers of the other
// sign are clamped to `levels`.
template <int bits, bool stochastic>
struct Levels {
  static constexpr int kBits = bits;
  static constexpr int kGroup = 0;

  Norm norm;     // kLargest, kSigned, kEuclidean, or kRootMean to clip
  float levels;  // at most 2^(bits - 1) - 1
  float clip;    // the bound for clamping, in root mean squares of the block

  COMMHOOKS_HD float scale(float largest, float size) const {
    // One division for all norms, so that the loop over blocks is vectorized.
    const bool is_clipped = norm == Norm::kRootMean && size * clip < largest;
    const bool is_norm = norm == Norm::kEuclidean || norm == Norm::kSigned;
    const float top = is_norm ? size : (is_clipped ? size * clip : largest);
    return top / (norm == Norm::kSigned ? lowest() : levels);
  }

  COMMHOOKS_HD u32 code(float ratio, Random random, u32 index) const {
    const float wanted = clamp(ratio, lowest(), levels);
    const float shifted = wanted + kRounder;
    if constexpr (!stochastic) {
      return bits_of(shifted) & kMask;
    } else {
      // Take the level below, or the next one with the probability that makes the mean exact.
      const float nearest = shifted - kRounder;
      const u32 is_above = nearest > wanted ? 1 : 0;
      const float below = nearest - (float)(int)is_above;
      const u32 is_up = random.uniform(index) < wanted - below ? 1 : 0;
      return (bits_of(shifted) - is_above + is_up) & kMask;
    }
  }

  COMMHOOKS_HD float value(u32 code) const {
    return (float)((int)(code ^ kSign) - (int)kSign);
  }

 private:
  COMMHOOKS_HD float lowest() const {
    return norm == Norm::kSigned ? -1.0f - levels : -levels;
  }

  static constexpr u32 kMask = (1u << bits) - 1;
  static constexpr u32 kSign = 1u << (bits - 1);
};

// One bit per number: its sign, times a mean magnitude of the block.
//
// With the mean of |x|, the decoded block is as close to the block as signs times a scale can be
// (Karimireddy et al. 2019, section 4). With the root mean square it has the norm of the block
// (Tang et al. 2021, 1-bit Adam, section 3).
struct Sign {
  static constexpr int kBits = 1;
  static constexpr int kGroup = 0;

  Norm norm;  // kMean or kRootMean

  COMMHOOKS_HD float scale(float /*largest*/, float size) const {
    return size;
  }

  // Returns 1 for negative numbers. Zeros get random signs; a fixed sign would add up over steps.
  COMMHOOKS_HD u32 code(float ratio, Random random, u32 index) const {
    return select(magnitude_bits(ratio) == 0, random.coin(index) << 31, bits_of(ratio)) >> 31;
  }

  COMMHOOKS_HD float value(u32 code) const {
    return 1.0f - 2.0f * (float)(int)code;
  }
};

// What formats have as options.
struct Options {
  Norm norm;
  float levels;
  float clip;
};

template <int bits, bool stochastic>
COMMHOOKS_HD void configure(Levels<bits, stochastic>& codec, const Options& options) {
  codec = {options.norm, options.levels, options.clip};
}

COMMHOOKS_HD void configure(Sign& codec, const Options& options) {
  codec.norm = options.norm;
}

template <typename Codec>
COMMHOOKS_HD void configure(Codec& /*codec*/, const Options& /*options*/) {}

}  // namespace commhooks::codecs

// The list of all formats, under the names that they have in commhooks/codecs/formats.py. The loops
// of each list are compiled on their own, in parallel.
#define COMMHOOKS_INTEGERS(ROW) \
  ROW(Levels<2, false>)         \
  ROW(Levels<2, true>)          \
  ROW(Levels<4, false>)         \
  ROW(Levels<4, true>)          \
  ROW(Levels<8, false>)         \
  ROW(Levels<8, true>)
#define COMMHOOKS_FLOATS(ROW) \
  ROW(E4M3)                   \
  ROW(E5M2)                   \
  ROW(E3M0)                   \
  ROW(Mxfp4)                  \
  ROW(Nvfp4)
#define COMMHOOKS_SIGNS(ROW) \
  ROW(Natural)               \
  ROW(Sign)
