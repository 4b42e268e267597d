// Packs and unpacks the indices of sparse gradients, adds their values, and draws random indices.
#pragma once

#include <ATen/core/Tensor.h>

namespace commhooks {

// Writes ascending int32 indices as a bitmap of `high_bits` bits, then `low_bits` bits for each
// index, both as little-endian words of 64 bits, into all of `packed` (uint8). See Note [Index
// code] in commhooks/codecs/index_code.py.
void pack_indices(
    const at::Tensor& indices,
    int64_t high_bits,
    int64_t low_bits,
    bool adds_ordinal,
    at::Tensor& packed);

// Reads `packed` into all of `indices`. Throws unless they are ascending and below `numel`.
void unpack_indices(
    const at::Tensor& packed,
    int64_t high_bits,
    int64_t low_bits,
    bool adds_ordinal,
    int64_t numel,
    at::Tensor& indices);

// out[indices[i]] += values[i] for ascending int32 indices; float32 or float64. The result does not
// depend on the number of threads.
void scatter_add(const at::Tensor& values, const at::Tensor& indices, at::Tensor& out);

// Fills `indices` with random, distinct, ascending int32 indices below `numel`. See RandomIndices
// in kernels/codecs/sparse.h. The result does not depend on the number of threads.
void draw_indices(int64_t seed, int64_t rotation, int64_t numel, at::Tensor& indices);

}  // namespace commhooks
