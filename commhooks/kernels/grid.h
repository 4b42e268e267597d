// Reductions and scans over the threads of a block, and the last block of a launch.
#pragma once

#include "codecs/portable.h"

namespace commhooks::kernels {

using codecs::u32;
using codecs::u64;
using i64 = long long;

// Returns true in the last block of the launch that calls it; that block sees everything that the
// other blocks wrote before their calls. `ticket` must be zero and is zero again afterwards. All
// threads of all blocks have to call it.
__device__ inline bool is_last_block(u32* ticket) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(ticket, 1u) == gridDim.x * gridDim.y - 1;
    if (is_last) {
      *ticket = 0;
    }
  }
  __syncthreads();
  __threadfence();
  return is_last;
}

// Returns the sum of `value` over the threads before this one; `total` becomes the sum over all
// threads. All `threads` of a block have to call it.
template <int threads>
__device__ inline u64 sum_before(u64 value, u64* total) {
  __shared__ u64 of_warps[threads / 32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  u64 up_to_here = value;
  for (int distance = 1; distance < 32; distance *= 2) {
    const u64 before = __shfl_up_sync(~0u, up_to_here, distance);
    up_to_here += lane >= distance ? before : 0;
  }
  if (lane == 31) {
    of_warps[warp] = up_to_here;
  }
  __syncthreads();
  u64 before = up_to_here - value;
  *total = 0;
  for (int i = 0; i < threads / 32; ++i) {
    before += i < warp ? of_warps[i] : 0;
    *total += of_warps[i];
  }
  __syncthreads();  // another call writes to the same memory
  return before;
}

// Returns the sum of `value` over a warp, always added in the same order. All lanes call it.
__device__ inline double sum_over_warp(double value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(~0u, value, distance);
  }
  return value;
}

// Returns the sum of `value` over all `threads` of a block, always added in the same order. All
// threads have to call it.
template <int threads>
__device__ inline double sum_over(double value) {
  __shared__ double of_warps[threads / 32];
  value = sum_over_warp(value);
  if (threadIdx.x % 32 == 0) {
    of_warps[threadIdx.x / 32] = value;
  }
  __syncthreads();
  double total = 0;
  for (int i = 0; i < threads / 32; ++i) {
    total += of_warps[i];
  }
  __syncthreads();  // another call writes to the same memory
  return total;
}

// Replaces each of `counts` by the sum of the counts before it; returns the sum of all. All
// `threads` of one block have to call it.
template <int threads>
__device__ inline u64 scan(u64* counts, i64 length) {
  const i64 share = (length + threads - 1) / threads;
  const i64 begin = share * threadIdx.x < length ? share * threadIdx.x : length;
  const i64 end = begin + share < length ? begin + share : length;
  u64 own = 0;
  for (i64 i = begin; i < end; ++i) {
    own += counts[i];
  }
  u64 total;
  u64 before = sum_before<threads>(own, &total);
  for (i64 i = begin; i < end; ++i) {
    const u64 count = counts[i];
    counts[i] = before;
    before += count;
  }
  return total;
}

}  // namespace commhooks::kernels
