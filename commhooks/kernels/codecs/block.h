// The arithmetic that all block codecs share. A block of numbers is sent as one float32 scale and a
// code of a few bits per number, and
//
//     decoded number = scale * Codec::value(code)
//
// A codec is a struct with
//
//     static constexpr int kBits;                          1, 2, 4 or 8
//     Norm norm;                                           the norm of the block that scale() takes
//     float scale(float largest, float norm) const;
//     u32 code(float ratio, Random, u32 index) const;      the code of a number / scale
//     float value(u32 code) const;
//     static constexpr int kGroup;                         0, or:
//
// If kGroup is not 0, blocks are divided into groups of so many numbers. Each has a scale of 8
// bits, which are the code of a number that is not negative, and
//
//     decoded number = scale * Codec::group_scale(group's code) * Codec::value(code)
//
//     u32 group_code(float ratio) const;                   of the group's largest number / scale
//     float group_scale(u32 group_code) const;
#pragma once

#include "codecs/portable.h"
#include "codecs/random.h"

namespace commhooks::codecs {

enum class Norm {
  kLargest,    // max |x|
  kSigned,     // the x of the largest |x|; positive if there are both
  kMean,       // mean |x|
  kRootMean,   // sqrt(mean x^2)
  kEuclidean,  // sqrt(sum x^2)
};

// Larger magnitudes are treated as an overflow, because sums and products with them may overflow.
constexpr float kLargestNumber = 0x1p126f;
// If all magnitudes of a block are smaller than this, it is sent as zeros: its scale would be too
// small for float32, or the inverse of the scale too large.
constexpr float kSmallestLargest = 0x1p-100f;

// Whether a block has a scale, given the bits of its largest magnitude. Otherwise the scale is 0 or
// NaN and the codes are 0, so that the block is decoded to zeros or to NaN.
COMMHOOKS_HD bool has_scale(u32 largest_bits) {
  return largest_bits >= bits_of(kSmallestLargest) && largest_bits <= bits_of(kLargestNumber);
}

COMMHOOKS_HD float scale_without(u32 largest_bits) {
  return largest_bits < bits_of(kSmallestLargest) ? 0.0f : float_of(0x7fc00000u);
}

// Note [Order of sums]
//
// A norm needs the sum over a block of |x| / max |x|, or of its square, which neither overflows nor
// underflows. Rounding depends on the order of the sum, so the order is the same on every machine:
// a block is divided into chunks. The two halves of a chunk are added element by element, then the
// two halves of the result, until one number is left. The numbers of the chunks are added in the
// same way. Padding a block with zeros to a power of two does not change the sum.
constexpr int kChunk = 512;
constexpr int kMaxChunks = 8;

template <bool squares>
COMMHOOKS_HD float sum_term(float value, float inverse) {
  const float ratio = value * inverse;
  return squares ? ratio * ratio : float_of(magnitude_bits(ratio));
}

COMMHOOKS_CONSTEXPR bool sums_squares(Norm norm) {
  return norm == Norm::kRootMean || norm == Norm::kEuclidean;
}

// Returns the norm of `count` numbers from that sum; `largest` is their largest magnitude.
COMMHOOKS_HD float norm_from(Norm norm, float largest, float sum, int count) {
  const double size = largest;
  const double terms = count;
  if (norm == Norm::kMean) {
    return (float)(size * (sum / terms));
  }
  return (float)(size * square_root(norm == Norm::kRootMean ? sum / terms : (double)sum));
}

// Returns what the numbers of a group are multiplied by before they are encoded.
COMMHOOKS_HD float group_inverse(float inverse, float group_scale) {
  return inverse / float_of(select(group_scale == 0.0f, bits_of(1.0f), bits_of(group_scale)));
}

// Adding this to a number below 2^22 rounds it to the nearest integer, ties to even. The lowest
// bits of the sum are this integer in two's complement.
constexpr float kRounder = 0x1.8p23f;

}  // namespace commhooks::codecs
