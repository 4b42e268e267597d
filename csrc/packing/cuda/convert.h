// Copies, scales and casts many pieces of device memory in one launch. Does not depend on torch.
#pragma once

#include "packing/piece.h"

#include <cstddef>
#include <cstdint>

using cudaStream_t = struct CUstream_st*;

namespace commhooks::cuda {

// Whether there is machine code for the current device, or code from which the driver can make it.
bool has_image();

enum class Element { fp64, fp32, fp16, bf16 };

// destination = cast<to>(scale * source) for every piece, as `convert` in packing/convert.h: halves
// are multiplied in fp32, fp64 in fp64, casts round to nearest even.
//
// Enqueued on `stream`, of the current device, without waiting. The tables are arguments of the
// kernel, so nothing is copied to the device first, nothing has to be kept alive, and a CUDA graph
// can capture it. One launch handles up to 1360 pieces (of at most 2^30 elements; longer ones count
// several times). Returns null, or the error message of CUDA.
//
// `finite`: null, or device memory that is set to false if a written number is not finite.
const char* convert(
    const Piece* pieces,
    size_t count,
    Element from,
    Element to,
    double scale,
    bool* finite,
    cudaStream_t stream);

}  // namespace commhooks::cuda
