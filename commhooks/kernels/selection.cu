// Select elements of a gradient: the same indices as csrc/sparse/selection.cpp.
//
// Note [Selection on the device]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The host launches all kernels at once and does not read any result in between:
//
//   begin    from a sample, compute a bound that slightly more than k elements probably reach
//   mark     add the error; set a bit for each element that reaches the bound     reads all
//   refine   find the k-th largest key of the marked elements, digit by digit      reads marked
//   count    count the keys that are larger and that are equal, per chunk          reads marked
//   list     write the indices of all larger keys and of the first equal keys      reads marked
//
// A key is the bits of a magnitude. If the sample was misleading and fewer than k elements are
// marked, all elements become candidates, which is slower but gives the same result. If fewer than
// k elements are nonzero, zeros are selected too, and there is nothing to refine. Passes over
// candidates read the bits, and only the 32 bytes of the gradient around each candidate.

#include "codecs/sparse.h"
#include "grid.h"
#include "vector.h"

namespace commhooks::kernels {

using codecs::magnitude_bits;
using codecs::u8;

constexpr int kThreads = 256;
constexpr int kWord = 32;                 // elements per word of marks
constexpr int kChunk = kThreads * kWord;  // elements per block that counts or lists
constexpr int kAhead = 4;                 // vectors that a thread loads before it uses the first
constexpr int kSamplingThreads = 1024;
constexpr int kSampleBytes = 64;  // per thread, in registers
constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;

template <typename T>
using Key = decltype(magnitude_bits(T{}));

// The state of one selection in global memory. It is followed by a word of marks for each kWord
// elements, up to the end of the last chunk, and for each chunk by the number of larger and of
// equal keys before it.
struct Selection {
  u64 bound;        // elements with at least this key are marked
  u64 marked;       // the number of marked elements
  u64 key;          // the k-th largest: the digits found so far, from the top, then zeros
  u64 rank;         // its rank, from 1, among the candidates with these digits
  u64 selected;     // the number of keys larger than `key`, set by `count`
  u32 only_marked;  // whether only marked elements are candidates; otherwise all are
  u32 is_refined;   // whether `key` is known without `refine`
  u32 ticket;
  u32 histogram[kDigits];  // of the current digit
};

static_assert(sizeof(Selection) == 8248, "selection.py allocates this size");

__device__ inline u32* marks_of(Selection* selection) {
  return (u32*)(selection + 1);
}

__device__ inline u64* offsets_of(Selection* selection, i64 numel) {
  const i64 chunks = (numel + kChunk - 1) / kChunk;
  return (u64*)(marks_of(selection) + chunks * (kChunk / kWord));
}

// Finds the digit of the element of rank *rank, counted from the largest digit; histogram[d]
// elements have digit d. *rank becomes its rank among the elements with the same digit. All threads
// of a block have to call it; all get the same result.
template <int threads>
__device__ u32 pick_digit(const u32* histogram, u64* rank) {
  constexpr int share = kDigits / threads;
  __shared__ u32 digit;
  __shared__ u64 rank_there;
  const int top = kDigits - 1 - threadIdx.x * share;
  u64 own = 0;
  for (int i = 0; i < share; ++i) {
    own += histogram[top - i];
  }
  u64 total;
  u64 before = sum_before<threads>(own, &total);
  if (before < *rank && *rank <= before + own) {
    int found = top;
    while (*rank > before + histogram[found]) {
      before += histogram[found--];
    }
    digit = found;
    rank_there = *rank - before;
  }
  __syncthreads();
  *rank = rank_there;
  return digit;
}

template <typename T>
__device__ u64 shared_digits(Key<T> key, int shift, int width) {
  return key >> shift >> width;
}

// One block. The bound becomes the key of rank `sample_rank` in a sample; if that is 0, `bound`.
template <typename T>
__global__ void __launch_bounds__(kSamplingThreads) begin(
    const T* gradient,
    const T* error,
    i64 numel,
    i64 sample_rank,
    u64 bound,
    Selection* selection) {
  constexpr int samples_per_thread = kSampleBytes / sizeof(T);
  constexpr i64 samples = samples_per_thread * kSamplingThreads;
  __shared__ u32 histogram[kDigits];
  Key<T> key = 0;
  if (sample_rank > 0) {
    Key<T> keys[samples_per_thread];
    for (int i = 0; i < samples_per_thread; ++i) {
      // One element from each of `samples` runs, at positions that no pattern in the data follows.
      const i64 sample = (i64)i * kSamplingThreads + threadIdx.x;
      const i64 start = sample * numel / samples;
      const i64 stop = (sample + 1) * numel / samples;
      const u64 hash = (u64)sample * 0x9e3779b97f4a7c15ull;  // Weyl sequence
      const i64 at = start + (i64)((hash >> 32) * (u64)(stop - start) >> 32);
      keys[i] = magnitude_bits(error == nullptr ? gradient[at] : gradient[at] + error[at]);
    }
    u64 rank = sample_rank;
    for (int shift = 8 * sizeof(T); shift > 0;) {
      const int width = shift < kDigitBits ? shift : kDigitBits;
      shift -= width;
      for (int i = threadIdx.x; i < kDigits; i += kSamplingThreads) {
        histogram[i] = 0;
      }
      __syncthreads();
      for (int i = 0; i < samples_per_thread; ++i) {
        if (shared_digits<T>(keys[i], shift, width) == shared_digits<T>(key, shift, width)) {
          atomicAdd(&histogram[keys[i] >> shift & ((1u << width) - 1)], 1u);
        }
      }
      __syncthreads();
      key |= (Key<T>)pick_digit<kSamplingThreads>(histogram, &rank) << shift;
      __syncthreads();
    }
    bound = key;
  }
  for (int i = threadIdx.x; i < kDigits; i += kSamplingThreads) {
    selection->histogram[i] = 0;
  }
  if (threadIdx.x == 0) {
    selection->bound = bound > 0 ? bound : 1;  // zeros are not marked
    selection->marked = 0;
    selection->key = 0;
    selection->ticket = 0;
  }
}

// Spreads the low bits of `bits` to every `spacing`-th bit, from bit 0 on.
template <int spacing>
__device__ u32 spread(u32 bits) {
  if constexpr (spacing == 4) {
    bits = (bits | bits << 12) & 0x000f000fu;
    bits = (bits | bits << 6) & 0x03030303u;
    return (bits | bits << 3) & 0x11111111u;
  } else {
    bits = (bits | bits << 8) & 0x00ff00ffu;
    bits = (bits | bits << 4) & 0x0f0f0f0fu;
    bits = (bits | bits << 2) & 0x33333333u;
    return (bits | bits << 1) & 0x55555555u;
  }
}

// Chooses the candidates from the number of marked elements.
__device__ void choose_candidates(u64 count, Selection* selection) {
  const u64 marked = selection->marked;
  const bool only_zeros_are_left = marked < count && selection->bound == 1;
  selection->only_marked = marked >= count;
  selection->is_refined = only_zeros_are_left;  // the k-th largest key is 0
  selection->rank = only_zeros_are_left ? count - marked : count;
}

// A warp reads 32 vectors kAhead times; each time its first lanes write the words of marks.
template <typename T>
__global__ void __launch_bounds__(kThreads, 4)
    mark(T* gradient, const T* error, i64 numel, u64 count, Selection* selection) {
  constexpr int size = Vector<T>::size;
  __shared__ u32 marked_in_block;
  if (threadIdx.x == 0) {
    marked_in_block = 0;
  }
  __syncthreads();
  const auto bound = (Key<T>)selection->bound;
  const int lane = threadIdx.x % 32;
  u32 marked = 0;
  const i64 chunk = (i64)blockIdx.x * kChunk;
  const i64 end = chunk + kChunk < numel ? chunk + kChunk : numel;
  constexpr int step = kThreads * size;
  static_assert(kChunk % (kAhead * step) == 0, "a chunk is read to its end");
  const i64 first = chunk + threadIdx.x / 32 * 32 * size;
  for (i64 group = first; group < end; group += kAhead * step) {
    Vector<T> sums[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      sums[a] = load(gradient, group + a * step + lane * size, numel);
    }
    if (error != nullptr) {
      Vector<T> errors[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        errors[a] = load(error, group + a * step + lane * size, numel);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        for (int i = 0; i < size; ++i) {
          sums[a].items[i] += errors[a].items[i];
        }
        store(gradient, group + a * step + lane * size, numel, sums[a]);
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      u32 word = 0;
      for (int i = 0; i < size; ++i) {
        const u32 reach = __ballot_sync(~0u, magnitude_bits(sums[a].items[i]) >= bound);
        word |= spread<size>(reach >> lane % size * (32 / size) & ((1ull << 32 / size) - 1)) << i;
      }
      const i64 place = group + a * step + lane * kWord;
      if (lane < size && place < numel) {
        marks_of(selection)[place / kWord] = word;
        marked += __popc(word);
      }
    }
  }
  atomicAdd(&marked_in_block, marked);
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(&selection->marked, (u64)marked_in_block);
  }
  if (is_last_block(&selection->ticket) && threadIdx.x == 0) {
    choose_candidates(count, selection);
  }
}

// Returns the candidates among the elements of a word of marks, as bits.
__device__ u32 candidates(i64 word, i64 numel, Selection* selection) {
  if (word * kWord >= numel) {
    return 0;
  }
  if (selection->only_marked) {
    return marks_of(selection)[word];
  }
  const i64 left = numel - word * kWord;
  return left >= kWord ? ~0u : (1u << left) - 1;
}

// Calls `body(index, key)` for each candidate in ascending order of indices.
template <typename T, typename Body>
__device__ void for_each_candidate(const T* gradient, i64 word, u32 bits, const Body& body) {
  for (; bits != 0; bits &= bits - 1) {
    const i64 index = word * kWord + __ffs(bits) - 1;
    body(index, magnitude_bits(gradient[index]));
  }
}

// Finds the digit of the k-th largest key that has `width` bits from bit `shift` on.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    refine(const T* gradient, i64 numel, i64 shift, i64 width, Selection* selection) {
  if (selection->is_refined) {
    return;
  }
  __shared__ u32 histogram[kDigits];
  for (int i = threadIdx.x; i < kDigits; i += kThreads) {
    histogram[i] = 0;
  }
  __syncthreads();
  const u64 digits = shared_digits<T>((Key<T>)selection->key, shift, width);
  const i64 stride = (i64)gridDim.x * kThreads;
  for (i64 word = (i64)blockIdx.x * kThreads + threadIdx.x; word * kWord < numel; word += stride) {
    const u32 bits = candidates(word, numel, selection);
    for_each_candidate(gradient, word, bits, [&](i64, Key<T> key) {
      if (shared_digits<T>(key, shift, width) == digits) {
        atomicAdd(&histogram[key >> shift & ((1u << width) - 1)], 1u);
      }
    });
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kDigits; i += kThreads) {
    if (histogram[i] > 0) {
      atomicAdd(&selection->histogram[i], histogram[i]);
    }
  }
  if (!is_last_block(&selection->ticket)) {
    return;
  }
  u64 rank = selection->rank;
  const u64 digit = pick_digit<kThreads>(selection->histogram, &rank);
  __syncthreads();
  for (int i = threadIdx.x; i < kDigits; i += kThreads) {
    selection->histogram[i] = 0;
  }
  if (threadIdx.x == 0) {
    selection->key |= digit << shift;
    selection->rank = rank;
  }
}

// Returns the number of candidates of a word whose keys are larger than the k-th largest in the
// high half, and the number of candidates with this key in the low half.
template <typename T>
__device__ u64 larger_and_equal(const T* gradient, i64 word, u32 bits, const Selection* selection) {
  const auto kth = (Key<T>)selection->key;
  u64 both = 0;
  for_each_candidate(gradient, word, bits, [&](i64, Key<T> key) {
    both += (u64)(key > kth) << 32 | (u64)(key == kth);
  });
  return both;
}

// One block per chunk.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    count(const T* gradient, i64 numel, Selection* selection) {
  u64* const offsets = offsets_of(selection, numel);
  const i64 word = (i64)blockIdx.x * kThreads + threadIdx.x;
  const u32 bits = candidates(word, numel, selection);
  u64 total;
  sum_before<kThreads>(larger_and_equal(gradient, word, bits, selection), &total);
  if (threadIdx.x == 0) {
    offsets[blockIdx.x] = total;
  }
  if (!is_last_block(&selection->ticket)) {
    return;
  }
  total = scan<kThreads>(offsets, gridDim.x);
  if (threadIdx.x == 0) {
    selection->selected = total >> 32;
  }
}

// One block per chunk. Writes at most `limit` indices.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    list(const T* gradient, i64 numel, Selection* selection, i64 limit, int* indices) {
  const i64 word = (i64)blockIdx.x * kThreads + threadIdx.x;
  const u32 bits = candidates(word, numel, selection);
  u64 total;
  const u64 before = offsets_of(selection, numel)[blockIdx.x] +
      sum_before<kThreads>(larger_and_equal(gradient, word, bits, selection), &total);
  const auto kth = (Key<T>)selection->key;
  const i64 equal_wanted = selection->rank;
  i64 larger = before >> 32;
  i64 equal = before & 0xffffffffu;
  for_each_candidate(gradient, word, bits, [&](i64 index, Key<T> key) {
    const i64 position = larger + (equal < equal_wanted ? equal : equal_wanted);
    if ((key > kth || (key == kth && equal < equal_wanted)) && position < limit) {
      indices[position] = (int)index;
    }
    larger += key > kth;
    equal += key == kth;
  });
}

// Adds the error. `is_damaged`, initially false, becomes true if a sum is not finite.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_and_check(T* gradient, const T* error, i64 numel, u8* is_damaged) {
  const Key<T> infinity = magnitude_bits((T)codecs::float_of(0x7f800000u));
  for_each_vector<T>(numel, [&](i64 at) {
    Vector<T> sums = load(gradient, at, numel);
    bool is_finite = true;
    if (error != nullptr) {
      const Vector<T> errors = load(error, at, numel);
      for (int i = 0; i < Vector<T>::size; ++i) {
        sums.items[i] += errors.items[i];
      }
      store(gradient, at, numel, sums);
    }
    for (int i = 0; i < Vector<T>::size; ++i) {
      is_finite &= magnitude_bits(sums.items[i]) < infinity;
    }
    if (!is_finite) {
      *is_damaged = 1;  // all threads that come here write the same
    }
  });
}

}  // namespace commhooks::kernels
