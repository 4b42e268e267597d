// What low-rank compression needs beside products: orthonormal bases, and the end of a step.

#include "codecs/portable.h"
#include "grid.h"
#include "vector.h"

namespace commhooks::kernels {

using codecs::u8;

constexpr int kBasisThreads = 512;
constexpr int kMaxRank = 256;
constexpr int kThreads = 256;
constexpr int kRows = 4;  // that a thread handles together: it loads right factors once for them

// One column of a matrix in memory.
template <typename T>
struct Column {
  T* base;
  i64 stride;

  __device__ T& operator[](i64 row) const {
    return base[row * stride];
  }
};

// Applies the reflection I - tau·v·vᵀ of column `pivot`, v = (1, below...), to the rows from `pivot`
// on of `column`. For all threads of a block.
template <typename T>
__device__ void reflect(Column<T> v, double tau, Column<T> column, i64 pivot, i64 rows) {
  double product = threadIdx.x == 0 ? (double)column[pivot] : 0;
  for (i64 row = pivot + 1 + threadIdx.x; row < rows; row += kBasisThreads) {
    product += (double)v[row] * column[row];
  }
  const double factor = tau * sum_over<kBasisThreads>(product);
  for (i64 row = pivot + 1 + threadIdx.x; row < rows; row += kBasisThreads) {
    column[row] = (T)(column[row] - factor * v[row]);
  }
  if (threadIdx.x == 0) {
    column[pivot] = (T)(column[pivot] - factor);
  }
  __syncthreads();
}

// One block per matrix, (rows, rank), with these strides: an orthonormal basis of its columns, by
// Householder's QR as in LAPACK's geqr2 and org2r, summed in float64. Where columns depend on each
// other the basis is completed with other directions.
template <typename T>
__global__ void __launch_bounds__(kBasisThreads) orthonormalise(
    const T* factors, i64 rows, i64 rank, i64 row_stride, i64 column_stride, T* basis) {
  __shared__ double taus[kMaxRank];
  factors += blockIdx.x * rows * rank;
  basis += blockIdx.x * rows * rank;
  const auto column = [&](i64 index) {
    return Column<T>{basis + index * column_stride, row_stride};
  };
  for (i64 i = threadIdx.x; i < rows * rank; i += kBasisThreads) {
    basis[i] = factors[i];
  }
  __syncthreads();
  for (i64 pivot = 0; pivot < rank; ++pivot) {
    const Column<T> own = column(pivot);
    double squares = 0;
    for (i64 row = pivot + 1 + threadIdx.x; row < rows; row += kBasisThreads) {
      squares += (double)own[row] * own[row];
    }
    squares = sum_over<kBasisThreads>(squares);
    const double top = own[pivot];
    double tau = 0;  // no reflection where there is nothing below the pivot
    if (squares != 0) {
      const double norm = sqrt(top * top + squares);
      const double image = top > 0 ? -norm : norm;
      tau = (image - top) / image;
      for (i64 row = pivot + 1 + threadIdx.x; row < rows; row += kBasisThreads) {
        own[row] = (T)(own[row] / (top - image));
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      taus[pivot] = tau;
    }
    for (i64 other = pivot + 1; other < rank; ++other) {
      reflect(own, tau, column(other), pivot, rows);
    }
  }
  __syncthreads();
  for (i64 pivot = rank - 1; pivot >= 0; --pivot) {
    const Column<T> own = column(pivot);
    const double tau = taus[pivot];
    for (i64 other = pivot + 1; other < rank; ++other) {
      reflect(own, tau, column(other), pivot, rows);
    }
    for (i64 row = threadIdx.x; row < rows; row += kBasisThreads) {
      own[row] = row < pivot ? (T)0 : row == pivot ? (T)(1 - tau) : (T)(-tau * own[row]);
    }
    __syncthreads();
  }
}

// error = error + gradient - own_left·own_right; gradient = mean_left·mean_right. Where the verdict
// is false, the error stays as it is and the gradient becomes NaN. `error` may be null. Of the
// matrices blockIdx.y; a thread handles a vector of columns in kRows rows.
template <typename T>
__global__ void __launch_bounds__(kThreads) absorb(
    const u8* verdict,
    T* error,
    T* gradient,
    i64 rows,
    i64 columns,
    i64 spacing,
    i64 rank,
    const T* own_left,
    const T* own_right,
    const T* mean_left,
    const T* mean_right) {
  constexpr int size = Vector<T>::size;
  const i64 vectors = (columns + size - 1) / size;
  const i64 thread = (i64)blockIdx.x * kThreads + threadIdx.x;
  const i64 first = thread / vectors * kRows;
  const i64 at = thread % vectors * size;
  if (first >= rows) {
    return;
  }
  const i64 matrix = blockIdx.y;
  gradient += matrix * spacing;
  own_left += matrix * rows * rank;
  mean_left += matrix * rows * rank;
  own_right += matrix * rank * columns;
  mean_right += matrix * rank * columns;
  const bool is_sound = *verdict;
  const bool has_error = error != nullptr && is_sound;
  error += has_error ? matrix * rows * columns : 0;
  Vector<T> rest[kRows];
  Vector<T> mean[kRows];
  for (int i = 0; i < kRows; ++i) {
    const i64 row = first + i;
    rest[i] = {};
    if (has_error && row < rows) {
      rest[i] = load(error + row * columns, at, columns);
      const Vector<T> own = load(gradient + row * columns, at, columns);
      for (int j = 0; j < size; ++j) {
        rest[i].items[j] += own.items[j];
      }
    }
    for (int j = 0; j < size; ++j) {
      mean[i].items[j] = is_sound ? (T)0 : (T)codecs::float_of(0x7fc00000u);
    }
  }
  for (i64 f = 0; f < rank; ++f) {
    const Vector<T> own = load(own_right + f * columns, at, columns);
    const Vector<T> of_all = load(mean_right + f * columns, at, columns);
    for (int i = 0; i < kRows; ++i) {
      const i64 row = first + i < rows ? first + i : first;
      const T left = own_left[row * rank + f];
      const T mean_of_left = mean_left[row * rank + f];
      for (int j = 0; j < size; ++j) {
        rest[i].items[j] = fma(-left, own.items[j], rest[i].items[j]);
        mean[i].items[j] = fma(mean_of_left, of_all.items[j], mean[i].items[j]);
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    const i64 row = first + i;
    if (row < rows) {
      if (has_error) {
        store(error + row * columns, at, columns, rest[i]);
      }
      store(gradient + row * columns, at, columns, mean[i]);
    }
  }
}

}  // namespace commhooks::kernels
