#include "packing/cuda/convert.h"
#include "packing/cuda/element.cuh"
#include "packing/cuda/launch.h"

#include <algorithm>

namespace commhooks::cuda {
namespace {

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

// Returns the last of `count` pieces that begins at `tile` or before.
__device__ int find_piece(const uint32_t* first_tile, int count, uint32_t tile) {
  int low = 0;
  for (int high = count; high - low > 1;) {
    const int middle = (low + high) / 2;
    (first_tile[middle] <= tile ? low : high) = middle;
  }
  return low;
}

// See Note [Tiles]. Arguments of a kernel may take 4 KiB, or 32764 bytes since CUDA 12.1. They are
// copied with every launch, so a short list has a small table.
template <int capacity_>
struct Table {
  static constexpr int capacity = capacity_;

  const void* source[capacity];
  void* destination[capacity];
  uint32_t first_tile[capacity];
  uint32_t numel[capacity];
  int count;
};
using SmallTable = Table<168>;
using LargeTable = Table<1360>;
static_assert(sizeof(SmallTable) + sizeof(double) + sizeof(bool*) <= 4096);
static_assert(sizeof(LargeTable) + sizeof(double) + sizeof(bool*) <= 32764);

template <typename T, unsigned width>
struct alignas(sizeof(T) * width) Vector {
  T values[width];
};

// Copies the `count` vectors of one tile, at most kTileElements / width. All are read before the
// first is written, so that the reads overlap. Returns whether the numbers that this thread wrote
// are finite; that is always computed, because it is hidden behind the memory accesses.
template <unsigned width, typename From, typename To>
__device__ bool convert_vectors(
    const From* source, To* destination, unsigned count, Math<From, To> scale) {
  constexpr unsigned kRounds = kTileElements / width / kThreads;
  const auto* in = reinterpret_cast<const Vector<From, width>*>(source);
  auto* out = reinterpret_cast<Vector<To, width>*>(destination);
  Vector<From, width> read[kRounds];
  bool finite = true;
#pragma unroll
  for (unsigned round = 0; round < kRounds; ++round) {
    const unsigned i = round * kThreads + threadIdx.x;
    if (i < count) {
      read[round] = in[i];
    }
  }
#pragma unroll
  for (unsigned round = 0; round < kRounds; ++round) {
    const unsigned i = round * kThreads + threadIdx.x;
    if (i < count) {
      Vector<To, width> converted;
#pragma unroll
      for (unsigned j = 0; j < width; ++j) {
        converted.values[j] = convert_element<To>(read[round].values[j], scale);
        finite &= is_finite(converted.values[j]);
      }
      out[i] = converted;
    }
  }
  return finite;
}

template <typename T>
__device__ bool is_aligned(const T* pointer, unsigned width) {
  return reinterpret_cast<uintptr_t>(pointer) % (sizeof(T) * width) == 0;
}

// Buckets have no padding, so a parameter of odd length shifts all later ones: then the alignment
// of source and destination differs, and elements are copied one by one, still coalesced in a warp.
template <typename From, typename To>
__device__ bool convert_tile(
    const From* source, To* destination, unsigned numel, Math<From, To> scale) {
  constexpr unsigned kWidth = 16 / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
  unsigned done = 0;
  bool finite = true;
  if (is_aligned(source, kWidth) && is_aligned(destination, kWidth)) {
    finite = convert_vectors<kWidth>(source, destination, numel / kWidth, scale);
    done = numel - numel % kWidth;
  }
  return convert_vectors<1>(source + done, destination + done, numel - done, scale) && finite;
}

template <typename To>
__device__ void zero_tile(To* destination, unsigned numel) {
  constexpr unsigned kWidth = 16 / sizeof(To);
  unsigned done = 0;
  if (is_aligned(destination, kWidth)) {
    for (unsigned i = threadIdx.x; i < numel / kWidth; i += kThreads) {
      reinterpret_cast<Vector<To, kWidth>*>(destination)[i] = {};
    }
    done = numel - numel % kWidth;
  }
  for (unsigned i = done + threadIdx.x; i < numel; i += kThreads) {
    destination[i] = To{};
  }
}

template <typename From, typename To, typename Pieces>
__global__ void __launch_bounds__(kThreads)
    convert_pieces(const __grid_constant__ Pieces table, Math<From, To> scale, bool* finite) {
  const int i = find_piece(table.first_tile, table.count, blockIdx.x);
  const unsigned start = (blockIdx.x - table.first_tile[i]) * kTileElements;
  const unsigned rest = table.numel[i] - start;
  const unsigned numel = rest < kTileElements ? rest : kTileElements;
  To* destination = static_cast<To*>(table.destination[i]) + start;
  if (table.source[i] == nullptr) {
    zero_tile(destination, numel);
  } else {
    const From* source = static_cast<const From*>(table.source[i]) + start;
    if (!convert_tile(source, destination, numel, scale) && finite != nullptr) {
      *finite = false;  // all threads that come here write the same
    }
  }
}

// Fills tables, and launches a kernel for each.
template <typename From, typename To, typename Pieces>
cudaError_t convert_all(
    const Piece* pieces, size_t count, double scale, bool* finite, cudaStream_t stream) {
  Pieces table{};
  uint32_t tiles = 0;
  cudaError_t error = cudaSuccess;
  const auto launch_table = [&] {
    if (tiles > 0 && error == cudaSuccess) {
      error = launch(
          convert_pieces<From, To, Pieces>, tiles, kThreads, stream, table,
          static_cast<Math<From, To>>(scale), finite);
    }
    table.count = 0;
    tiles = 0;
  };
  for (size_t i = 0; i < count; ++i) {
    const auto* source = static_cast<const From*>(pieces[i].source);
    auto* destination = static_cast<To*>(pieces[i].destination);
    for (int64_t start = 0; start < pieces[i].numel; start += kLongestPiece) {
      if (table.count == Pieces::capacity) {
        launch_table();
      }
      const int64_t numel = std::min(pieces[i].numel - start, kLongestPiece);
      const int row = table.count++;
      table.source[row] = source == nullptr ? nullptr : source + start;
      table.destination[row] = destination + start;
      table.first_tile[row] = tiles;
      table.numel[row] = static_cast<uint32_t>(numel);
      tiles += static_cast<uint32_t>((numel + kTileElements - 1) / kTileElements);
    }
  }
  launch_table();
  return error;
}

}  // namespace

bool has_image() {
  cudaFuncAttributes attributes{};
  const auto* kernel = reinterpret_cast<const void*>(convert_pieces<float, float, SmallTable>);
  const bool found = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess;
  cudaGetLastError();  // or the next launch would report it
  return found;
}

const char* convert(
    const Piece* pieces,
    size_t count,
    Element from,
    Element to,
    double scale,
    bool* finite,
    cudaStream_t stream) {
  const cudaError_t error = with_element(from, [&](auto source) {
    return with_element(to, [&](auto destination) {
      using From = decltype(source);
      using To = decltype(destination);
      return count <= SmallTable::capacity
          ? convert_all<From, To, SmallTable>(pieces, count, scale, finite, stream)
          : convert_all<From, To, LargeTable>(pieces, count, scale, finite, stream);
    });
  });
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace commhooks::cuda
