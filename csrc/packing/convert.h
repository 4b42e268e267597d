// Copies, scales and casts many pieces of memory in one parallel pass.
#pragma once

#include "packing/piece.h"

#include <c10/core/ScalarType.h>

#include <vector>

namespace commhooks {

// destination = cast<to>(scale * source) for every piece, in one pass over the memory. Elements are
// divided evenly among ATen's threads, whether there are many small pieces or a large one.
// Half-precision values are multiplied in fp32, fp64 in fp64; casts round to nearest even.
// Floating types only (fp64, fp32, fp16, bf16).
//
// `stream`: write without filling the caches, if the CPU can. For destinations that are larger than
// a cache: it avoids reading each line before it is overwritten, a third of the traffic of a copy.
//
// `finite`: null, or a flag that is set to false if a written number is not finite, and does not
// change otherwise. Tiles are checked while they are in the innermost cache.
void convert(
    const std::vector<Piece>& pieces,
    c10::ScalarType from,
    c10::ScalarType to,
    double scale,
    bool stream,
    bool* finite);

}  // namespace commhooks
