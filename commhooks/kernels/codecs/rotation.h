// The rotation of numbers before they are quantized.
//
// Note [Rotation]
// ~~~~~~~~~~~~~~~
// A block of n = 2^k numbers x becomes y = H·D·x / √n. D has random signs on its diagonal, and H is
// the Hadamard matrix in Sylvester's order: k stages of sums and differences of numbers that are
// h = 1, 2, 4, ..., n/2 apart. So y has the norm of x, and a single large number, which would make
// the scale of all others large, is spread over the block. H is symmetric, so x = D·H·y / √n.
//
// A part is divided into blocks of kRotation numbers, and the rest into smaller ones, the largest
// first. The same numbers are added in the same order everywhere, so all machines compute the same
// bits.
#pragma once

#include "codecs/portable.h"

namespace commhooks::codecs {

constexpr u32 kRotation = 128;

// Returns 1 << 31 if the number at this place in its part changes its sign, otherwise 0. `Word`:
// u32, or a vector of them.
template <typename Word>
COMMHOOKS_HD Word rotation_sign(Word place) {
  Word hash = place * 0x9e3779b1u;
  hash ^= hash >> 15;
  hash *= 0x85ebca77u;
  return hash & 0x80000000u;
}

// Returns the size of the block that has a number, of which there are `count` up to kRotation.
COMMHOOKS_HD u32 rotated_together(u32 place, u32 count) {
  u32 size = kRotation;
  while (((place ^ count) & size) == 0) {
    size /= 2;
  }
  return size;
}

// Returns 1 / √size of a power of two.
template <typename T>
COMMHOOKS_HD T rotation_factor(u32 size) {
  T factor = 1;
  for (; size >= 4; size /= 4) {
    factor /= 2;
  }
  return size == 2 ? factor * (T)0.70710678118654752440 : factor;
}

}  // namespace commhooks::codecs
