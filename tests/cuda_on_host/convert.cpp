// The kernels of csrc/packing/cuda for the host, as C functions that return how many they launched.
#include "cuda_emulation.h"
#define __grid_constant__

#include "packing/cuda/convert.cu"

#define EXPORT extern "C" __attribute__((visibility("default")))

using commhooks::Piece;
using commhooks::cuda::Element;

EXPORT int convert(
    const Piece* pieces,
    size_t count,
    int from,
    int to,
    double scale,
    bool* finite,
    int is_backward) {
  commhooks::cuda::launches = 0;
  emulation::machine.is_backward = is_backward != 0;
  const char* error = commhooks::cuda::convert(
      pieces, count, static_cast<Element>(from), static_cast<Element>(to), scale, finite, nullptr);
  return error == nullptr ? commhooks::cuda::launches : -1;
}

// Tells whether there is an image, on a device for which there is machine code or not.
EXPORT bool has_image(bool has_code) {
  has_machine_code = has_code;
  const bool found = commhooks::cuda::has_image();
  has_machine_code = true;
  return found;
}
