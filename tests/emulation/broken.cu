// Kernels for tests of the emulation. The name of each one says what is wrong with it.

namespace {

__global__ void sum_by_halves(float* values, long long count) {
  __shared__ float sums[128];
  const int thread = (int)threadIdx.x;
  sums[thread] = thread < count ? values[blockIdx.x * count + thread] : 0.0f;
  __syncthreads();
  for (int half = (int)blockDim.x / 2; half > 0; half /= 2) {
    if (thread < half) {
      sums[thread] += sums[thread + half];
    }
    __syncthreads();
  }
  if (thread == 0) {
    values[blockIdx.x * count] = sums[0];
  }
}

__global__ void misses_a_barrier(float* values, long long count) {
  if (threadIdx.x < count) {
    values[threadIdx.x] = 1.0f;
    __syncthreads();
  }
}

__global__ void waits_at_two_barriers(float* values, long long count) {
  if (threadIdx.x < count) {
    __syncthreads();
  } else {
    values[0] = 1.0f;
    __syncthreads();
  }
}

__global__ void shuffles_without_a_lane(float* values, long long count) {
  if (threadIdx.x == count) {
    return;
  }
  values[threadIdx.x] = __shfl_xor_sync(0xffffffffu, values[threadIdx.x], 1);
}

__global__ void forgets_a_barrier(float* values, long long count) {
  __shared__ float last;
  if (threadIdx.x == count - 1) {
    last = values[threadIdx.x];
  }
  values[threadIdx.x] = last;
}

__global__ void reads_beyond_the_end(float* values, long long count) {
  values[0] = values[threadIdx.x + count];
}

// A correct kernel: stores the results of all warp collectives, for each lane.
__global__ void all_collectives(int* found, long long count) {
  const unsigned all = 0xffffffffu;
  const int lane = (int)threadIdx.x;
  const int value = found[lane];
  int* const mine = found + 32 + lane * count;
  mine[0] = __shfl_sync(all, value, 3);
  mine[1] = __shfl_sync(all, value, 1, 8);
  mine[2] = __shfl_xor_sync(all, value, 5);
  mine[3] = __shfl_up_sync(all, value, 2);
  mine[4] = __shfl_down_sync(all, value, 2, 16);
  mine[5] = (int)__ballot_sync(all, value % 3 == 0);
  mine[6] = __any_sync(all, value == 7) ? 1 : 0;
  mine[7] = __all_sync(all, value < 100) ? 1 : 0;
  mine[8] = (int)__match_any_sync(all, value % 4);
  mine[9] = __reduce_add_sync(all, value);
  mine[10] = (int)__reduce_max_sync(all, (unsigned)value);
  mine[11] = __syncthreads_count(value % 2);
  mine[12] = lane < 4 ? __shfl_xor_sync(0xfu, value, 1) : -1;
  __syncwarp();
  mine[13] = atomicAdd(found + 32 + 32 * count, 1) >= 0 ? 1 : 0;
}

}  // namespace
