// Low-rank compression of all matrices of a bucket, of whatever shapes, each step in one launch:
// orthonormal bases, products with them, messages and their average, and the end of a step. Ranges
// that are sent uncompressed ("exact") take part in messages and in the end of a step.
//
// Note [Tall and thin]
// ~~~~~~~~~~~~~~~~~~~~
// A product of a matrix with a few vectors takes no longer than reading the matrix, so M = E + G is
// read once, in vectors. Its columns or rows are divided into spans, so that there are enough
// threads:
//
//   project_left    P = M·Qᵀ    a warp: a few rows, a span of columns; its lanes add up at the end
//   project_right   Q = Pᵀ·M    a thread: a vector of columns, a span of rows
//
// Sums over the first spans are written to the place of the factors, those over further spans
// behind everything that is sent, and `message` adds them up, span by span: without atomics, and
// always in the same order.

#include "codecs/portable.h"
#include "grid.h"
#include "vector.h"

namespace commhooks::kernels {

using codecs::u8;

constexpr int kBasisThreads = 512;
constexpr int kMaxRank = 256;
constexpr int kThreads = 256;
constexpr int kRows = 4;  // rows per thread of `apply`: right factors are loaded once for them

constexpr int kWarps = kThreads / 32;

// The sides: which of the factors of a matrix.
constexpr int kLeft = 0;
constexpr int kRight = 1;

struct Factor {
  i64 start;        // where it begins among the factors of its side
  i64 first_block;  // the first block of `project_left` or `project_right` that computes it
  i64 span;         // how many columns (left) or rows (right) one sum is over
  i64 further;      // where the sums over further spans begin, behind what is sent
};

// One matrix of a bucket: its shape, and where its numbers are, in elements. Or, with rank 0, an
// exact range: one row, with its place behind the factors. Letters as in
// algorithms/lowrank/compressor.py.
struct Matrix {
  i64 first_block;  // the first block of `apply` that handles it
  i64 gradient;     // (rows, columns) in the bucket
  i64 error;        // (rows, columns) in the errors
  i64 rows;
  i64 columns;
  i64 rank;
  Factor factors[2];  // (rows, rank) and (rank, columns)
};

// Returns the last of `count` matrices with `begins(matrix) <= place`; they are sorted by it.
template <typename Begins>
__device__ inline const Matrix& find_matrix(
    const Matrix* matrices, i64 count, i64 place, const Begins& begins) {
  i64 low = 0;
  for (i64 high = count; high - low > 1;) {
    const i64 middle = (low + high) / 2;
    (begins(matrices[middle]) <= place ? low : high) = middle;
  }
  return matrices[low];
}

// One column of a matrix in memory.
template <typename T>
struct Column {
  T* base;
  i64 stride;

  __device__ T& operator[](i64 row) const {
    return base[row * stride];
  }
};

// Applies the reflection I - tau·v·vᵀ with v = (1, elements below `pivot` of the column v) to the
// rows of `column` from `pivot` on. All threads of a block call it.
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

// Computes orthonormal bases of the columns of left factors, or of the rows of right ones, by
// Householder's QR as in LAPACK's geqr2 and org2r, with sums in float64. Where columns depend on
// each other the basis is completed with other directions. One block per matrix.
template <typename T>
__global__ void __launch_bounds__(kBasisThreads)
    orthonormalize(const Matrix* matrices, i64 side, const T* factors, T* basis) {
  __shared__ double taus[kMaxRank];
  const Matrix& matrix = matrices[blockIdx.x];
  const i64 rank = matrix.rank;
  const bool is_left = side == kLeft;
  const i64 rows = is_left ? matrix.rows : matrix.columns;
  const i64 row_stride = is_left ? rank : 1;
  const i64 column_stride = is_left ? 1 : rows;
  factors += matrix.factors[side].start;
  basis += matrix.factors[side].start;
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

// Loads a vector of M = E + G. `error` may be null.
template <typename T, typename G>
__device__ Vector<T> load_sum(const T* error, const G* gradient, i64 at, i64 columns) {
  Vector<T> sum = load_as<T>(gradient, at, columns);
  if (error != nullptr) {
    const Vector<T> old = load(error, at, columns);
    for (int j = 0; j < Vector<T>::size; ++j) {
      sum.items[j] += old.items[j];
    }
  }
  return sum;
}

// Copies an exact range: one vector per thread.
template <typename T, typename G>
__device__ void copy_exact(const Matrix& matrix, int side, const G* bucket, T* own) {
  const Factor& place = matrix.factors[side];
  const i64 thread = (blockIdx.x - place.first_block) * kThreads + threadIdx.x;
  const i64 at = thread * Vector<T>::size;
  if (at < matrix.columns) {
    const Vector<T> numbers = load_as<T>(bucket + matrix.gradient, at, matrix.columns);
    store(own + place.start, at, matrix.columns, numbers);
  }
}

// Returns where the sums over a span are written. `sent`: how many numbers are sent.
template <typename T>
__device__ T* place_of_sums(const Matrix& matrix, int side, i64 span, i64 sent, T* own) {
  const Factor& factor = matrix.factors[side];
  const i64 length = matrix.rank * (side == kLeft ? matrix.rows : matrix.columns);
  return own + (span == 0 ? factor.start : sent + factor.further + (span - 1) * length);
}

// Each lane of a warp has 32 numbers; lane i returns the sum of all lanes' numbers at index i.
template <typename T>
__device__ T sum_by_lane(T (&numbers)[32]) {
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    const bool is_upper = threadIdx.x & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const T sent = is_upper ? numbers[i] : numbers[i + half];
      const T kept = is_upper ? numbers[i + half] : numbers[i];
      numbers[i] = kept + __shfl_xor_sync(~0u, sent, half);
    }
  }
  return numbers[0];
}

// Computes P = M·Qᵀ of matrices of rank `most` or less, and copies exact ranges. See Note [Tall and
// thin].
template <typename T, typename G, int most>
__global__ void __launch_bounds__(kThreads, 2) project_left(
    const Matrix* matrices,
    i64 count,
    const T* errors,
    const G* bucket,
    const T* basis,
    i64 sent,
    T* own) {
  constexpr int size = Vector<T>::size;
  constexpr int together = 32 / most;  // rows per warp, so that each lane ends with one sum
  const auto begins = [](const Matrix& matrix) { return matrix.factors[kLeft].first_block; };
  const Matrix matrix = find_matrix(matrices, count, blockIdx.x, begins);
  if (matrix.rank == 0) {
    copy_exact(matrix, kLeft, bucket, own);
    return;
  }
  const Factor& factor = matrix.factors[kLeft];
  const i64 rows = matrix.rows;
  const i64 columns = matrix.columns;
  const i64 groups = (rows + together - 1) / together;
  const i64 warp = (blockIdx.x - factor.first_block) * kWarps + threadIdx.x / 32;
  const i64 span = warp / groups;
  const i64 first = warp % groups * together;
  const i64 begin = span * factor.span;
  if (begin >= columns) {
    return;
  }
  const i64 end = begin + factor.span < columns ? begin + factor.span : columns;
  const int lane = threadIdx.x % 32;
  const G* const gradient = bucket + matrix.gradient;
  const T* const right = basis + matrix.factors[kRight].start;
  T sums[32] = {};
  for (i64 at = begin + lane * size; at < end; at += 32 * size) {
    Vector<T> numbers[together];
#pragma unroll
    for (int i = 0; i < together; ++i) {
      const i64 start = (first + i < rows ? first + i : first) * columns;
      const T* const error = errors == nullptr ? nullptr : errors + matrix.error + start;
      numbers[i] = load_sum(error, gradient + start, at, columns);
    }
#pragma unroll
    for (int f = 0; f < most; ++f) {
      if (f < matrix.rank) {
        const Vector<T> vector = load(right + f * columns, at, columns);
#pragma unroll
        for (int i = 0; i < together; ++i) {
          for (int j = 0; j < size; ++j) {
            T& sum = sums[i * most + f];
            sum = fma(numbers[i].items[j], vector.items[j], sum);
          }
        }
      }
    }
  }
  const T sum = sum_by_lane(sums);
  const i64 row = first + lane / most;
  const int f = lane % most;
  if (row < rows && f < matrix.rank) {
    place_of_sums(matrix, kLeft, span, sent, own)[row * matrix.rank + f] = sum;
  }
}

// Computes Q = Pᵀ·M; otherwise as `project_left`.
template <typename T, typename G, int most>
__global__ void __launch_bounds__(kThreads, 2) project_right(
    const Matrix* matrices,
    i64 count,
    const T* errors,
    const G* bucket,
    const T* basis,
    i64 sent,
    T* own) {
  constexpr int size = Vector<T>::size;
  constexpr int ahead = 32 / most;  // rows that a thread loads before it multiplies the first
  const auto begins = [](const Matrix& matrix) { return matrix.factors[kRight].first_block; };
  const Matrix matrix = find_matrix(matrices, count, blockIdx.x, begins);
  if (matrix.rank == 0) {
    copy_exact(matrix, kRight, bucket, own);
    return;
  }
  const Factor& factor = matrix.factors[kRight];
  const i64 rows = matrix.rows;
  const i64 columns = matrix.columns;
  const i64 vectors = (columns + size - 1) / size;
  const i64 thread = (blockIdx.x - factor.first_block) * kThreads + threadIdx.x;
  const i64 span = thread / vectors;
  const i64 at = thread % vectors * size;
  const i64 begin = span * factor.span;
  if (begin >= rows) {
    return;
  }
  const i64 end = begin + factor.span < rows ? begin + factor.span : rows;
  const G* const gradient = bucket + matrix.gradient;
  const T* const left = basis + matrix.factors[kLeft].start;
  Vector<T> sums[most] = {};
  for (i64 first = begin; first < end; first += ahead) {
    Vector<T> numbers[ahead];
#pragma unroll
    for (int a = 0; a < ahead; ++a) {
      const i64 start = (first + a < end ? first + a : first) * columns;
      const T* const error = errors == nullptr ? nullptr : errors + matrix.error + start;
      numbers[a] = load_sum(error, gradient + start, at, columns);
    }
#pragma unroll
    for (int a = 0; a < ahead; ++a) {
      if (first + a >= end) {
        break;
      }
#pragma unroll
      for (int f = 0; f < most; ++f) {
        if (f < matrix.rank) {
          const T of_row = left[(first + a) * matrix.rank + f];
          for (int j = 0; j < size; ++j) {
            sums[f].items[j] = fma(of_row, numbers[a].items[j], sums[f].items[j]);
          }
        }
      }
    }
  }
  T* const to = place_of_sums(matrix, kRight, span, sent, own);
#pragma unroll
  for (int f = 0; f < most; ++f) {
    if (f < matrix.rank) {
      store(to + f * columns, at, columns, sums[f]);
    }
  }
}

// Adds up the sums over spans of the first `factors` numbers, and copies everything that is sent to
// `total`. Numbers larger than `largest` become NaN in both places, as products with them could
// overflow on one rank only. `all_finite` becomes true; it may be null.
template <typename T>
__global__ void __launch_bounds__(kThreads) message(
    const Matrix* matrices,
    i64 count,
    i64 side,
    i64 factors,
    T* own,
    i64 sent,
    double largest,
    T* total,
    u8* all_finite) {
  if (all_finite != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    *all_finite = 1;
  }
  const i64 stride = (i64)gridDim.x * kThreads;
  for (i64 i = (i64)blockIdx.x * kThreads + threadIdx.x; i < sent; i += stride) {
    T number = own[i];
    if (i < factors) {
      const auto begins = [&](const Matrix& matrix) { return matrix.factors[side].start; };
      const Matrix& matrix = find_matrix(matrices, count, i, begins);
      const Factor& factor = matrix.factors[side];
      const i64 summed = side == kLeft ? matrix.columns : matrix.rows;
      const i64 spans = (summed + factor.span - 1) / factor.span;
#pragma unroll 4
      for (i64 span = 1; span < spans; ++span) {
        number += place_of_sums(matrix, side, span, sent, own)[i - factor.start];
      }
    }
    if (fabs((double)number) > largest) {
      number = (T)codecs::float_of(0x7fc00000u);
    }
    own[i] = number;
    total[i] = number;
  }
}

// Divides a sum over ranks by their number; `all_finite` becomes false if a result is not finite.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    average(T* total, i64 numel, i64 ranks, u8* all_finite) {
  bool is_finite = true;
  for_each_vector<T>(numel, [&](i64 at) {
    Vector<T> numbers = load(total, at, numel);
    for (int j = 0; j < Vector<T>::size; ++j) {
      numbers.items[j] /= (T)ranks;
      is_finite &= isfinite(numbers.items[j]) != 0;
    }
    store(total, at, numel, numbers);
  });
  if (!is_finite) {
    *all_finite = 0;  // all threads that come here write the same
  }
}

// Copies each vector of `fresh`, except vectors of zeros, to `kept` if `all_finite` is true. One
// block per matrix and vector: a column of a left factor, a row of a right one.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    keep(const u8* all_finite, const Matrix* matrices, i64 side, const T* fresh, T* kept) {
  const Matrix& matrix = matrices[blockIdx.x];
  if (blockIdx.y >= matrix.rank) {
    return;
  }
  const i64 length = side == kLeft ? matrix.rows : matrix.columns;
  const i64 stride = side == kLeft ? matrix.rank : 1;
  const i64 start = matrix.factors[side].start + blockIdx.y * (side == kLeft ? 1 : length);
  bool is_alive = false;
  for (i64 i = threadIdx.x; i < length; i += kThreads) {
    is_alive |= fresh[start + i * stride] != 0;
  }
  if (!__syncthreads_or(is_alive) || !*all_finite) {
    return;
  }
  for (i64 i = threadIdx.x; i < length; i += kThreads) {
    kept[start + i * stride] = fresh[start + i * stride];
  }
}

// Ends a step of `halves` half steps, whose factors lie `lefts` and `rights` elements a With the
// sums over these of the products:
//
//   error = error + gradient - own_left·own_right      gradient = mean_left·mean_right
//
// Exact ranges are copied from `exact`, where they follow factors of `exact_side`. If `all_finite`
// is false errors stay as they are and gradients become NaN. Results beyond the range of G are
// clamped, and the rest goes to the errors. `errors` may be null. A thread handles a vector of
// columns in kRows rows.
template <typename T, typename G>
__global__ void __launch_bounds__(kThreads) apply(
    const u8* all_finite,
    const Matrix* matrices,
    i64 count,
    T* errors,
    G* bucket,
    i64 halves,
    i64 lefts,
    i64 rights,
    const T* own_left,
    const T* own_right,
    const T* mean_left,
    const T* mean_right,
    const T* exact,
    i64 exact_side) {
  constexpr int size = Vector<T>::size;
  const auto begins = [](const Matrix& matrix) { return matrix.first_block; };
  const Matrix matrix = find_matrix(matrices, count, blockIdx.x, begins);
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
  G* const gradient = bucket + matrix.gradient;
  const bool is_finite = *all_finite;
  const bool has_error = errors != nullptr && is_finite && rank > 0;
  T* const error = has_error ? errors + matrix.error : nullptr;
  Vector<T> rest[kRows];
  Vector<T> mean[kRows];
  for (int i = 0; i < kRows; ++i) {
    const i64 start = (first + i) * columns;
    rest[i] = {};
    if (has_error && first + i < rows) {
      rest[i] = load_sum(error + start, gradient + start, at, columns);
    }
    for (int j = 0; j < size; ++j) {
      mean[i].items[j] = is_finite ? (T)0 : (T)codecs::float_of(0x7fc00000u);
    }
  }
  if (rank == 0 && is_finite) {
    mean[0] = load(exact + matrix.factors[exact_side].start, at, columns);
  }
  for (i64 half = 0; half < halves; ++half) {
    const i64 left = half * lefts + matrix.factors[kLeft].start;
    const i64 right = half * rights + matrix.factors[kRight].start;
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
    const i64 start = (first + i) * columns;
    if (first + i < rows) {
      for (int j = 0; j < size && rank > 0; ++j) {
        const T whole = mean[i].items[j];
        const T kept = clamp(whole, gradient);
        mean[i].items[j] = kept;
        rest[i].items[j] += fabs(whole) > fabs(kept) ? whole - kept : (T)0;
      }
      if (has_error) {
        store(error + start, at, columns, rest[i]);
      }
      store_as(gradient + start, at, columns, mean[i]);
    }
  }
}

}  // namespace commhooks::kernels
