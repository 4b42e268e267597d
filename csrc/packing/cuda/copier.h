// Copies pieces on CUDA devices.
#pragma once

#include "packing/piece.h"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <vector>

namespace commhooks::cuda {

// Whether the kernels of packing/cuda/convert.h were compiled for the device.
bool has_kernels(c10::Device device);

// Copies pieces with one launch on the current stream of the device, see Copier::copy_pieces.
void copy_pieces(
    c10::Device device,
    const std::vector<Piece>& pieces,
    c10::ScalarType from,
    c10::ScalarType to,
    double scale,
    bool* finite);

}  // namespace commhooks::cuda
