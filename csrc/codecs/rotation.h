// Rotates numbers before they are quantized, and back. See Note [Rotation] in
// kernels/codecs/rotation.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace commhooks {

// Sets values to the rotation of values + added, part by part; with `inverse`, rotates back.
// Tensors are flat, contiguous, on the CPU, not empty, and have the same dtype, float32 or float64.
void rotate(
    const at::Tensor& values,
    const std::optional<at::Tensor>& added,
    int64_t part_length,
    bool inverse);

}  // namespace commhooks
