#include "packing/cuda/convert.h"
#include "packing/cuda/element.cuh"
#include "packing/cuda/launch.h"
#include "packing/cuda/table.cuh"

#include <algorithm>

namespace commhooks::cuda {
namespace {

// See Note [Tiles].
struct StridedTable {
  static constexpr int capacity = 21;

  StridedPiece pieces[capacity];
  uint32_t first_tile[capacity];
  int count;
};
static_assert(sizeof(StridedTable) + sizeof(double) + sizeof(bool*) <= 4096);

// Copies elements one by one: gradients with another memory order than their parameter are rare.
template <typename From, typename To>
__global__ void __launch_bounds__(kThreads) convert_strided_pieces(
    const __grid_constant__ StridedTable table, Math<From, To> scale, bool* finite) {
  const int found = find_piece(table.first_tile, table.count, blockIdx.x);
  const StridedPiece& piece = table.pieces[found];
  const unsigned start = (blockIdx.x - table.first_tile[found]) * kTileElements;
  const unsigned rest = piece.numel - start;
  const unsigned end = start + (rest < kTileElements ? rest : kTileElements);
  bool is_sound = true;
  for (unsigned i = start + threadIdx.x; i < end; i += kThreads) {
    int64_t source = 0;
    int64_t destination = 0;
    unsigned index = i;
    for (int dim = piece.dims - 1; dim >= 0; --dim) {
      const unsigned size = piece.sizes[dim];
      const unsigned coordinate = index % size;
      index /= size;
      source += coordinate * piece.source_strides[dim];
      destination += coordinate * piece.destination_strides[dim];
    }
    const To converted = convert_element<To>(static_cast<const From*>(piece.source)[source], scale);
    static_cast<To*>(piece.destination)[destination] = converted;
    is_sound &= is_finite(converted);
  }
  report(is_sound, finite);
}

template <typename From, typename To>
cudaError_t convert_all(
    const StridedPiece* pieces, size_t count, double scale, bool* finite, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  for (size_t first = 0; first < count && error == cudaSuccess; first += StridedTable::capacity) {
    StridedTable table{};
    uint32_t tiles = 0;
    const size_t end = std::min(first + StridedTable::capacity, count);
    for (size_t i = first; i < end; ++i) {
      table.pieces[table.count] = pieces[i];
      table.first_tile[table.count++] = tiles;
      tiles += tiles_of(pieces[i].numel);
    }
    if (tiles > 0) {
      const auto factor = static_cast<Math<From, To>>(scale);
      error =
          launch(convert_strided_pieces<From, To>, tiles, kThreads, stream, table, factor, finite);
    }
  }
  return error;
}

}  // namespace

const char* convert_strided(
    const StridedPiece* pieces,
    size_t count,
    Element from,
    Element to,
    double scale,
    bool* finite,
    cudaStream_t stream) {
  const cudaError_t error = with_elements(from, to, [&](auto source, auto destination) {
    return convert_all<decltype(source), decltype(destination)>(
        pieces, count, scale, finite, stream);
  });
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace commhooks::cuda
