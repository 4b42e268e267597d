// What all block codecs share: a block of numbers is sent as one float32 scale and a code of a few
// bits per number, and
//
//     decoded number = scale * Codec::value(code)
//
// A codec is a struct with
//
//     static constexpr int kBits;                          1, 2, 4 or 8
//     Norm norm;                                           what of the block it needs for the scale
//     float scale(float largest, float norm) const;
//     u32 code(float ratio, Random, u32 index) const;      of a number divided by the scale
//     float value(u32 code) const;
#pragma once

#include "codecs/portable.h"
#include "codecs/random.h"

namespace commhooks::codecs {

enum class Norm {
  kLargest,    // max |x|
  kMean,       // mean |x|
  kRootMean,   // sqrt(mean x^2)
  kEuclidean,  // sqrt(sum x^2)
};

// Numbers beyond this are taken for an overflow: sums and products with them would be one.
constexpr float kLargestNumber = 0x1p126f;
// Blocks without a number of this size are sent as zeros: a scale for them, or its inverse, would be
// too small or too large for float32.
constexpr float kSmallestLargest = 0x1p-100f;

// Whether a block whose largest magnitude has these bits has a scale. If not, the scale is 0 or NaN
// and codes are 0, so the block is decoded to zeros or to NaN.
COMMHOOKS_HD bool has_scale(u32 largest_bits) {
  return largest_bits >= bits_of(kSmallestLargest) && largest_bits <= bits_of(kLargestNumber);
}

COMMHOOKS_HD float scale_without(u32 largest_bits) {
  return largest_bits < bits_of(kSmallestLargest) ? 0.0f : float_of(0x7fc00000u);
}

// Adding this to a number below 2^22 rounds it to an integer, to nearest even, which then stands in
// the lowest bits of the sum, in two's complement.
constexpr float kRounder = 0x1.8p23f;

}  // namespace commhooks::codecs
