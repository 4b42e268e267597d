// What the threads of a block, and the blocks of a launch, find out together.
#pragma once

#include "codecs/portable.h"

namespace commhooks::kernels {

using codecs::u32;
using codecs::u64;
using i64 = long long;

// True in one block of the launch, the last to come here, which sees all that others wrote before.
// `ticket` is zero at first, and again afterwards. For all threads of all blocks.
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

// The sum of `value` over the threads before this one; `total`: over all. For all `threads` of a
// block.
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
  __syncthreads();  // before another call writes
  return before;
}

// The sum of `value` over all `threads` of a block, in one order. For all of them.
template <int threads>
__device__ inline double sum_over(double value) {
  __shared__ double of_warps[threads / 32];
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(~0u, value, distance);
  }
  if (threadIdx.x % 32 == 0) {
    of_warps[threadIdx.x / 32] = value;
  }
  __syncthreads();
  double total = 0;
  for (int i = 0; i < threads / 32; ++i) {
    total += of_warps[i];
  }
  __syncthreads();  // before another call writes
  return total;
}

// Each of `counts` becomes the sum of those before it; returns the sum of all. For all `threads` of
// one block.
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
