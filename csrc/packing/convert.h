// Copies, scales and casts many pieces of memory in one parallel pass.
#pragma once

#include "packing/piece.h"

#include <c10/core/ScalarType.h>

#include <vector>

namespace commhooks {

// destination = cast<to>(scale * source) for every piece. One pass over the memory, spread over
// ATen's threads by elements, so that neither many small pieces nor one large one leave threads idle.
// Half-precision values are multiplied in fp32, fp64 in fp64; casts round to nearest even.
// Floating types only (fp64, fp32, fp16, bf16).
//
// `stream`: write around the caches, where the CPU can. Right for destinations that are larger than a
// cache: it saves reading each line before it is overwritten, a third of the traffic of a copy.
//
// `finite`: null, or what becomes false if a number that was written is not finite, and stays as it is
// if none is. Tiles are looked at while they are in the innermost cache.
void convert(
    const std::vector<Piece>& pieces,
    c10::ScalarType from,
    c10::ScalarType to,
    double scale,
    bool stream,
    bool* finite);

}  // namespace commhooks
