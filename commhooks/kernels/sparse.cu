// Messages of sparse hooks: writing and reading indices, adding values in their places.
//
// `messages` holds the messages of all ranks one after the other, `pitch` bytes each: the indices
// as in Note [Index code] in commhooks/codecs/index_code.py, then the values from byte `values_at`
// on. Values are of type W, which may be half precision, and are added in T.

#include "codecs/sparse.h"
#include "grid.h"
#include "vector.h"

namespace commhooks::kernels {

using codecs::IndexCode;
using codecs::kWordBits;
using codecs::load_word;
using codecs::u8;

constexpr int kThreads = 256;
constexpr int kSegment = 4096;  // elements of the result that one block writes

__device__ i64 thread_index() {
  return (i64)blockIdx.x * blockDim.x + threadIdx.x;
}

// ------------------------------------------------------------------------------------- writing

// Writes a whole message into zeros. One thread for each index and its value, and for each word of
// low bits.
template <typename W>
__global__ void __launch_bounds__(kThreads) pack(
    const int* indices,
    const W* values,
    i64 count,
    i64 low_bits,
    i64 adds_ordinal,
    i64 high_words,
    i64 low_words,
    i64 values_at,
    u64* packed) {
  const IndexCode code{(int)low_bits, adds_ordinal != 0};
  const i64 thread = thread_index();
  if (thread < count) {
    const u64 position = code.position(indices[thread], thread);
    atomicOr(&packed[position / kWordBits], 1ull << position % kWordBits);
    ((W*)((u8*)packed + values_at))[thread] = values[thread];
  }
  if (thread < low_words) {
    const i64 begin = thread * kWordBits;
    u64 word = 0;
    for (i64 ordinal = begin / code.low_bits; ordinal < count; ++ordinal) {
      const i64 bit = ordinal * code.low_bits - begin;
      if (bit >= kWordBits) {
        break;
      }
      const u64 low = code.low(indices[ordinal]);
      word |= bit >= 0 ? low << bit : low >> -bit;
    }
    packed[high_words + thread] = word;
  }
}

// ------------------------------------------------------------------------------------- reading

// Loads this thread's word of the bitmap in the message of rank blockIdx.y.
__device__ u64 bitmap_word(const u8* messages, i64 pitch, i64 high_words) {
  const i64 word = thread_index();
  return word < high_words ? load_word(messages + blockIdx.y * pitch, word) : 0;
}

// `words`, which the kernels of one reading share, zeros at first:
//
//   | for each rank and block, the indices before the block | for each rank, its indices | ticket |
//     (ranks, tiles)                                           (ranks)
__device__ i64* counts_in(u64* words, i64 tiles) {
  return (i64*)(words + gridDim.y * tiles);
}

// Counts the indices; `all_finite` becomes whether no rank has more indices than `capacity`.
__global__ void __launch_bounds__(kThreads) count_indices(
    const u8* messages, i64 pitch, i64 high_words, i64 capacity, u64* words, u8* all_finite) {
  u64* const offsets = words;
  i64* const counts = counts_in(words, gridDim.x);
  u64 total;
  sum_before<kThreads>(__popcll(bitmap_word(messages, pitch, high_words)), &total);
  if (threadIdx.x == 0) {
    offsets[blockIdx.y * gridDim.x + blockIdx.x] = total;
  }
  if (!is_last_block((u32*)(counts + gridDim.y))) {
    return;
  }
  bool fits = true;
  for (u32 rank = 0; rank < gridDim.y; ++rank) {
    const i64 count = scan<kThreads>(offsets + rank * gridDim.x, gridDim.x);
    fits &= count <= capacity;
    if (threadIdx.x == 0) {
      counts[rank] = count <= capacity ? count : capacity;
    }
  }
  if (threadIdx.x == 0) {
    *all_finite = fits;
  }
}

// Writes the indices of all ranks to `indices`, (ranks, capacity).
__global__ void __launch_bounds__(kThreads) unpack(
    const u8* messages,
    i64 pitch,
    i64 low_bits,
    i64 adds_ordinal,
    i64 high_words,
    const u64* offsets,
    i64 capacity,
    int* indices) {
  const IndexCode code{(int)low_bits, adds_ordinal != 0};
  const u8* const low = messages + blockIdx.y * pitch + high_words * 8;
  u64 bits = bitmap_word(messages, pitch, high_words);
  u64 total;
  i64 ordinal =
      offsets[blockIdx.y * gridDim.x + blockIdx.x] + sum_before<kThreads>(__popcll(bits), &total);
  for (; bits != 0 && ordinal < capacity; bits &= bits - 1, ++ordinal) {
    const u64 position = thread_index() * kWordBits + __ffsll(bits) - 1;
    indices[blockIdx.y * capacity + ordinal] =
        (int)code.index(position, ordinal, codecs::read_field(low, code.low_bits, ordinal));
  }
}

template <typename W>
__device__ const W* values_of(const u8* messages, i64 pitch, i64 values_at, i64 rank) {
  return (const W*)(messages + rank * pitch + values_at);
}

// One thread for each value of each rank. `all_finite` becomes false if indices do not ascend or
// are not below `numel`, or if a value is not finite. `starts`, (ranks, segments + 1), becomes the
// position of the first index that is not before each segment of the result.
template <typename W>
__global__ void __launch_bounds__(kThreads) check(
    const u8* messages,
    i64 pitch,
    i64 values_at,
    const int* indices,
    i64 capacity,
    u64* words,
    i64 tiles,
    i64 numel,
    i64 segments,
    u32* starts,
    u8* all_finite) {
  const i64 ordinal = thread_index();
  const i64 count = counts_in(words, tiles)[blockIdx.y];
  starts += blockIdx.y * (segments + 1);
  if (ordinal == 0 && count == 0) {
    for (i64 segment = 0; segment <= segments; ++segment) {
      starts[segment] = 0;
    }
  }
  if (ordinal >= count) {
    return;
  }
  indices += blockIdx.y * capacity;
  const i64 index = indices[ordinal];
  const i64 previous = ordinal == 0 ? -1 : indices[ordinal - 1];
  const auto value = widen(values_of<W>(messages, pitch, values_at, blockIdx.y)[ordinal]);
  if (index <= previous || index >= numel || !(value - value == 0)) {
    *all_finite = false;
  }
  const i64 first = ordinal == 0 || previous < 0 ? 0 : previous / kSegment + 1;
  for (i64 segment = first; segment <= index / kSegment && segment <= segments; ++segment) {
    starts[segment] = (u32)ordinal;
  }
  if (ordinal == count - 1) {
    for (i64 segment = index < 0 ? 0 : index / kSegment + 1; segment <= segments; ++segment) {
      starts[segment] = (u32)count;
    }
  }
}

// ------------------------------------------------------------------------------------- results

// One block per segment. `mean` becomes the mean over ranks, summed in the order of ranks, or NaN
// unless `all_finite`. If `error` is not null and `all_finite` is true, `error` becomes `total`,
// which may share the mean's memory, minus what `own_rank` has sent.
template <typename T, typename W>
__global__ void __launch_bounds__(kThreads) store_mean(
    const u8* messages,
    i64 pitch,
    i64 values_at,
    const int* indices,
    i64 capacity,
    const u32* starts,
    i64 ranks,
    i64 numel,
    const u8* all_finite,
    i64 own_rank,
    const T* total,
    T* error,
    W* mean) {
  constexpr int size = Vector<T>::size;
  __shared__ Vector<T> numbers[kSegment / size];
  T* const sums = numbers[0].items;
  const i64 begin = (i64)blockIdx.x * kSegment;
  const bool is_finite = *all_finite;
  // All threads of a block have to call these.
  const auto fill = [&](T number) {
    for (int i = threadIdx.x; i < kSegment; i += kThreads) {
      sums[i] = number;
    }
    __syncthreads();
  };
  const auto add = [&](i64 rank, T divisor) {
    const W* const values = values_of<W>(messages, pitch, values_at, rank);
    const int* const own = indices + rank * capacity;
    const u32* const start = starts + rank * (gridDim.x + 1ll) + blockIdx.x;
    for (i64 i = start[0] + threadIdx.x; i < start[1]; i += kThreads) {
      sums[own[i] - begin] += widen(values[i]) / divisor;
    }
    __syncthreads();
  };
  if (error != nullptr && is_finite) {
    fill(0);
    add(own_rank, 1);
    for (int i = threadIdx.x; i < kSegment / size; i += kThreads) {
      const i64 at = begin + i * size;
      if (at < numel) {
        Vector<T> left = load(total, at, numel);
        for (int j = 0; j < size; ++j) {
          left.items[j] -= numbers[i].items[j];
        }
        store(error, at, numel, left);
      }
    }
    __syncthreads();
  }
  fill(is_finite ? (T)0 : (T)codecs::float_of(0x7fc00000u));
  for (i64 rank = 0; is_finite && rank < ranks; ++rank) {
    add(rank, (T)ranks);
  }
  for (int i = threadIdx.x; i < kSegment / size; i += kThreads) {
    const i64 at = begin + i * size;
    if (at < numel) {
      store_as(mean, at, numel, numbers[i]);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    scatter_add(const T* values, const int* indices, i64 count, i64 numel, T* out) {
  const i64 i = thread_index();
  if (i < count && 0 <= indices[i] && indices[i] < numel) {
    out[indices[i]] += values[i];
  }
}

__global__ void __launch_bounds__(kThreads)
    draw(u64 seed, u64 rotation, u64 numel, i64 count, int* indices) {
  const codecs::RandomIndices random(seed, rotation, numel, count);
  const i64 i = thread_index();
  if (i < count) {
    indices[i] = (int)random.at(i);
  }
}

// DGC's momentum correction: gradient = gradient + momentum * velocity; total = gradient + error.
template <typename T>
__global__ void __launch_bounds__(kThreads) correct_momentum(
    T* gradient, const T* velocity, const T* error, double momentum, i64 numel, T* total) {
  for_each_vector<T>(numel, [&](i64 at) {
    Vector<T> u = load(gradient, at, numel);
    Vector<T> v = load(error, at, numel);
    const Vector<T> old = load(velocity, at, numel);
    for (int i = 0; i < Vector<T>::size; ++i) {
      u.items[i] = fma((T)momentum, old.items[i], u.items[i]);
      v.items[i] = u.items[i] + v.items[i];
    }
    store(gradient, at, numel, u);
    store(total, at, numel, v);
  });
}

}  // namespace commhooks::kernels
