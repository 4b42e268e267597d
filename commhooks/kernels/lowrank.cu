// What low-rank compression needs beside products: orthonormal bases, what is sent and received, and
// the end of a step. One launch for all matrices of a bucket, of whatever shapes.

#include "codecs/portable.h"
#include "grid.h"
#include "vector.h"

namespace commhooks::kernels {

using codecs::u8;

constexpr int kBasisThreads = 512;
constexpr int kMaxRank = 256;
constexpr int kThreads = 256;
constexpr int kRows = 4;  // that a thread handles together: it loads right factors once for them

// One matrix of a bucket: its shape, and where its numbers are, in elements. As lowrank.py writes it.
struct Matrix {
  i64 first_block;  // of those of `absorb` that are its
  i64 gradient;     // (rows, columns) in the bucket
  i64 error;        // and in the errors
  i64 left;         // (rows, rank) among left factors
  i64 right;        // (rank, columns) among right factors
  i64 rows;
  i64 columns;
  i64 rank;
};

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

// One block per matrix: an orthonormal basis of the columns of its left factor, or of the rows of its
// right one, by Householder's QR as in LAPACK's geqr2 and org2r, summed in float64. Where columns depend
// on each other the basis is completed with other directions.
template <typename T>
__global__ void __launch_bounds__(kBasisThreads)
    orthonormalise(const Matrix* matrices, i64 is_left, const T* factors, T* basis) {
  __shared__ double taus[kMaxRank];
  const Matrix& matrix = matrices[blockIdx.x];
  const i64 rank = matrix.rank;
  const i64 rows = is_left ? matrix.rows : matrix.columns;
  const i64 row_stride = is_left ? rank : 1;
  const i64 column_stride = is_left ? 1 : rows;
  factors += is_left ? matrix.left : matrix.right;
  basis += is_left ? matrix.left : matrix.right;
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

// A copy to send; numbers of more than `largest` in size become NaN, here and there, as products with
// them could overflow on one rank only. `verdict`: null, or what becomes true.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    send(T* own, i64 numel, double largest, T* total, u8* verdict) {
  if (verdict != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    *verdict = 1;
  }
  for_each_vector<T>(numel, [&](i64 at) {
    Vector<T> numbers = load(own, at, numel);
    for (int j = 0; j < Vector<T>::size; ++j) {
      if (fabs((double)numbers.items[j]) > largest) {
        numbers.items[j] = (T)codecs::float_of(0x7fc00000u);
      }
    }
    store(own, at, numel, numbers);
    store(total, at, numel, numbers);
  });
}

// Makes a sum over `ranks` into their mean; the verdict becomes false if something is not finite.
template <typename T>
__global__ void __launch_bounds__(kThreads) receive(T* total, i64 numel, i64 ranks, u8* verdict) {
  bool is_sound = true;
  for_each_vector<T>(numel, [&](i64 at) {
    Vector<T> numbers = load(total, at, numel);
    for (int j = 0; j < Vector<T>::size; ++j) {
      numbers.items[j] /= (T)ranks;
      is_sound &= isfinite(numbers.items[j]) != 0;
    }
    store(total, at, numel, numbers);
  });
  if (!is_sound) {
    *verdict = 0;  // all that come here write the same
  }
}

// `kept` takes over each vector of `fresh`, but for those of zeros, if the verdict is true. One block
// per matrix and vector: a column of a left factor, a row of a right one.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    keep(const u8* verdict, const Matrix* matrices, i64 is_left, const T* fresh, T* kept) {
  const Matrix& matrix = matrices[blockIdx.x];
  if (blockIdx.y >= matrix.rank) {
    return;
  }
  const i64 length = is_left ? matrix.rows : matrix.columns;
  const i64 stride = is_left ? matrix.rank : 1;
  const i64 start = is_left ? matrix.left + blockIdx.y : matrix.right + blockIdx.y * length;
  bool is_alive = false;
  for (i64 i = threadIdx.x; i < length; i += kThreads) {
    is_alive |= fresh[start + i * stride] != 0;
  }
  if (!__syncthreads_or(is_alive) || !*verdict) {
    return;
  }
  for (i64 i = threadIdx.x; i < length; i += kThreads) {
    kept[start + i * stride] = fresh[start + i * stride];
  }
}

// The last of `count` matrices whose blocks begin at `block` or before.
__device__ inline const Matrix& find_matrix(const Matrix* matrices, i64 count, i64 block) {
  i64 low = 0;
  for (i64 high = count; high - low > 1;) {
    const i64 middle = (low + high) / 2;
    (matrices[middle].first_block <= block ? low : high) = middle;
  }
  return matrices[low];
}

// With the sums over `halves` half steps, whose factors lie `lefts` and `rights` elements apart:
// error = error + gradient - own_left·own_right; gradient = mean_left·mean_right. Where the verdict
// is false, errors stay as they are and gradients become NaN. `errors` may be null. A thread handles a
// vector of columns in kRows rows.
template <typename T>
__global__ void __launch_bounds__(kThreads) absorb(
    const u8* verdict,
    const Matrix* matrices,
    i64 count,
    T* errors,
    T* bucket,
    i64 halves,
    i64 lefts,
    i64 rights,
    const T* own_left,
    const T* own_right,
    const T* mean_left,
    const T* mean_right) {
  constexpr int size = Vector<T>::size;
  const Matrix matrix = find_matrix(matrices, count, blockIdx.x);
  const i64 rows = matrix.rows;
  const i64 columns = matrix.columns;
  const i64 rank = matrix.rank;
  const i64 vectors = (columns + size - 1) / size;
  const i64 thread = (blockIdx.x - matrix.first_block) * kThreads + threadIdx.x;
  const i64 first = thread / vectors * kRows;
  const i64 at = thread % vectors * size;
  if (first >= rows) {
    return;
  }
  T* const gradient = bucket + matrix.gradient;
  const bool is_sound = *verdict;
  const bool has_error = errors != nullptr && is_sound;
  T* const error = has_error ? errors + matrix.error : nullptr;
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
  for (i64 half = 0; half < halves; ++half) {
    const i64 left = half * lefts + matrix.left;
    const i64 right = half * rights + matrix.right;
    for (i64 f = 0; f < rank; ++f) {
      const Vector<T> own = load(own_right + right + f * columns, at, columns);
      const Vector<T> of_all = load(mean_right + right + f * columns, at, columns);
      for (int i = 0; i < kRows; ++i) {
        const i64 row = first + i < rows ? first + i : first;
        const T own_of_row = own_left[left + row * rank + f];
        const T mean_of_row = mean_left[left + row * rank + f];
        for (int j = 0; j < size; ++j) {
          rest[i].items[j] = fma(-own_of_row, own.items[j], rest[i].items[j]);
          mean[i].items[j] = fma(mean_of_row, of_all.items[j], mean[i].items[j]);
        }
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
