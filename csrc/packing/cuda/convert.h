// Copies, scales and casts many pieces of device memory in one launch. Knows nothing of torch.
#pragma once

#include "packing/piece.h"

#include <cstddef>
#include <cstdint>

using cudaStream_t = struct CUstream_st*;

namespace commhooks::cuda {

enum class Element { fp64, fp32, fp16, bf16 };

// Elements that lie neither consecutively nor in the same order on both sides. Dimensions are in any
// order, without those of size one; strides count elements, and those of the source may be zero.
struct StridedPiece {
  static constexpr int kMostDims = 8;

  const void* source;
  void* destination;
  uint32_t numel;
  int dims;
  uint32_t sizes[kMostDims];
  int64_t source_strides[kMostDims];
  int64_t destination_strides[kMostDims];
};

// destination = cast<to>(scale * source) for every piece, as `convert` in cpu/convert.h does it: halves
// are multiplied in fp32, fp64 in fp64, casts round to nearest even.
//
// Enqueued on `stream`, of the current device, and not waited for; the tables travel as arguments of
// the kernel, so nothing is copied to the device first, nothing has to be kept, and a CUDA graph can
// capture it. One launch up to 1360 pieces (of at most 2^30 elements, longer ones count several times),
// or 21 strided ones. Returns null, or what CUDA says is wrong.
//
// `finite`: null, or device memory which becomes false if a number that was written is not finite.
const char* convert(
    const Piece* pieces,
    size_t count,
    Element from,
    Element to,
    double scale,
    bool* finite,
    cudaStream_t stream);
const char* convert_strided(
    const StridedPiece* pieces,
    size_t count,
    Element from,
    Element to,
    double scale,
    bool* finite,
    cudaStream_t stream);

}  // namespace commhooks::cuda
