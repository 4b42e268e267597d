// Lists of pieces as arguments of a kernel, divided into tiles of equal size, one per block.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace commhooks::cuda {

// Note [Tiles]
// ~~~~~~~~~~~~
//     pieces   |---- 0 ----|- 1 -|------- 2 -------|
//     tiles    |--0--|-1---|--2--|--3--|--4--|--5--|     first_tile = {0, 2, 3}
//
// A tile is a part of one piece, with kTileElements elements except for the last tile of the piece.
// Block b handles tile b, and finds its piece by bisection in the arguments of the kernel, which
// are in constant memory; all threads read the same word. Blocks therefore have equal work for
// pieces of any sizes.
constexpr unsigned kThreads = 256;
constexpr unsigned kTileElements = 4096;

// The largest number of elements of a piece, so that indices within it fit 32 bits.
constexpr int64_t kLongestPiece = int64_t{1} << 30;

inline uint32_t tiles_of(int64_t numel) {
  return static_cast<uint32_t>((numel + kTileElements - 1) / kTileElements);
}

// Returns the last of `count` pieces that begins at `tile` or before.
__device__ inline int find_piece(const uint32_t* first_tile, int count, uint32_t tile) {
  int low = 0;
  int high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first_tile[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Called by all threads that found a number that is not finite; all write the same. `finite` may be
// null.
__device__ inline void report(bool is_finite, bool* finite) {
  if (!is_finite && finite != nullptr) {
    *finite = false;
  }
}

}  // namespace commhooks::cuda
