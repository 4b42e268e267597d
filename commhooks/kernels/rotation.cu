// Rotates numbers before they are quantized, and back: Note [Rotation] in codecs/rotation.h.

#include "codecs/rotation.h"

namespace commhooks::kernels {

using codecs::kRotation;
using codecs::u32;
using i64 = long long;

constexpr int kThreads = 256;
constexpr int kPerLane = kRotation / 32;

// Sets values to the rotation of values + added; `added` may be null. There are gridDim.y parts of
// `blocks` blocks each. A warp rotates a block: lane i has the numbers i, i + 32, i + 64, i + 96.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    rotate(T* values, const T* added, i64 numel, i64 part_length, i64 blocks, i64 inverse) {
  const i64 block = (i64)blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  const i64 offset = block * kRotation;
  const i64 first = blockIdx.y * part_length + offset;
  const i64 left = part_length - offset < numel - first ? part_length - offset : numel - first;
  if (block >= blocks || left <= 0) {
    return;
  }
  const u32 count = left < (i64)kRotation ? (u32)left : kRotation;
  T x[kPerLane];
  u32 sizes[kPerLane];
  for (int k = 0; k < kPerLane; ++k) {
    const u32 place = threadIdx.x % 32 + 32 * k;
    sizes[k] = place < count ? codecs::rotated_together(place, count) : 0;
    x[k] = place < count ? values[first + place] : (T)0;
    if (place < count && added != nullptr) {
      x[k] += added[first + place];
    }
    if (inverse == 0 && codecs::rotation_sign((u32)offset + place) != 0) {
      x[k] = -x[k];
    }
  }
  for (u32 h = 1; h < 32; h *= 2) {
    for (int k = 0; k < kPerLane; ++k) {
      const T other = __shfl_xor_sync(~0u, x[k], (int)h);
      const T combined = (threadIdx.x & h) != 0 ? other - x[k] : x[k] + other;
      x[k] = h < sizes[k] ? combined : x[k];
    }
  }
  for (int step = 1; step < kPerLane; step *= 2) {
    for (int k = 0; k < kPerLane; ++k) {
      if ((k & step) == 0 && 32 * step < (int)sizes[k]) {
        const T sum = x[k] + x[k + step];
        x[k + step] = x[k] - x[k + step];
        x[k] = sum;
      }
    }
  }
  for (int k = 0; k < kPerLane; ++k) {
    const u32 place = threadIdx.x % 32 + 32 * k;
    if (place < count) {
      const T rotated = x[k] * codecs::rotation_factor<T>(sizes[k]);
      const bool changes = inverse != 0 && codecs::rotation_sign((u32)offset + place) != 0;
      values[first + place] = changes ? -rotated : rotated;
    }
  }
}

}  // namespace commhooks::kernels
