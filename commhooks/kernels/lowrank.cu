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
//
// Note [Tall factors]
// ~~~~~~~~~~~~~~~~~~~
// Householder's QR goes over a factor once per column, each time in need of a sum, and one block
// has few threads. So the rows of a tall factor are divided into panels, and three launches replace
// one (TSQR: Demmel, Grigori, Hoemmen and Langou, SIAM J. Sci. Comput. 34(1), 2012):
//
//   orthonormalize    factor of panel i = Qᵢ·Rᵢ          a block: a panel
//   orthonormalize    R₀, R₁, ... below each other = S·R    a block: the stack of one factor
//   combine           basis of panel i = Qᵢ·Sᵢ           a block: a panel
//
// It is as stable as the QR of the whole factor, dependent columns included, and sums are always in
// the same order. Vectors of the basis may have other signs, which products with them do not show.
// Panels of √(rows·rank) rows are about as tall as the stack of their triangles.

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

// A factor, or some of its rows, as `orthonormalize` sees it: a tall matrix (rows, rank). For the
// right factor of a matrix, these are columns.
struct Panel {
  i64 start;  // where it begins among the factors of its side
  i64 row_stride;
  i64 column_stride;
  i64 rows;
  i64 rank;
  i64 work;      // where its columns are in `work`
  i64 triangle;  // where its triangle is in `triangles`, if it is a part of a factor, else -1

  __device__ bool is_part() const {
    return triangle >= 0;
  }

  // Calls `body(row, column, place among the factors)` for each number, in the threads of a block.
  template <typename Body>
  __device__ void for_each(const Body& body) const {
    for (i64 column = 0; column < rank; ++column) {
      for (i64 row = threadIdx.x; row < rows; row += kBasisThreads) {
        body(row, column, start + row * row_stride + column * column_stride);
      }
    }
  }
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

// Applies the reflection I - tau·v·vᵀ with v = (1, elements of the column `v` below `pivot`) to the
// elements of `column` from `pivot` on. A warp calls it.
template <typename T>
__device__ void reflect(const T* v, double tau, T* column, i64 pivot, i64 rows) {
  const int lane = threadIdx.x % 32;
  double product = lane == 0 ? (double)column[pivot] : 0;
  for (i64 row = pivot + 1 + lane; row < rows; row += 32) {
    product += (double)v[row] * column[row];
  }
  const double factor = tau * sum_over_warp(product);
  for (i64 row = pivot + 1 + lane; row < rows; row += 32) {
    column[row] = (T)(column[row] - factor * v[row]);
  }
  if (lane == 0) {
    column[pivot] = (T)(column[pivot] - factor);
  }
}

// As `reflect`, for the columns after `pivot`, one per warp. All threads of a block call it.
template <typename T>
__device__ void reflect_later_columns(double tau, T* columns, i64 pivot, i64 rows, i64 rank) {
  const T* const v = columns + pivot * rows;
  for (i64 other = pivot + 1 + threadIdx.x / 32; other < rank; other += kBasisThreads / 32) {
    reflect(v, tau, columns + other * rows, pivot, rows);
  }
  __syncthreads();
}

// Computes orthonormal bases of panels by Householder's QR as in LAPACK's geqr2 and org2r, with
// sums in float64. Where columns depend on each other the basis is completed with other directions.
// The basis of a whole factor goes to `basis`; that of a part stays in `work`, column by column,
// and the triangle goes to `triangles`. One block per panel. See Note [Tall factors].
template <typename T>
__global__ void __launch_bounds__(kBasisThreads)
    orthonormalize(const Panel* panels, const T* factors, T* work, T* triangles, T* basis) {
  __shared__ double taus[kMaxRank];
  const Panel panel = panels[blockIdx.x];
  const i64 rows = panel.rows;
  const i64 rank = panel.rank;
  T* const columns = work + panel.work;
  panel.for_each(
      [&](i64 row, i64 column, i64 place) { columns[column * rows + row] = factors[place]; });
  __syncthreads();
  for (i64 pivot = 0; pivot < rank; ++pivot) {
    T* const own = columns + pivot * rows;
    double squares = 0;
    for (i64 row = pivot + 1 + threadIdx.x; row < rows; row += kBasisThreads) {
      squares += (double)own[row] * own[row];
    }
    squares = sum_over<kBasisThreads>(squares);
    const double top = own[pivot];
    double image = top;
    double tau = 0;  // no reflection where there is nothing below the pivot
    if (squares != 0) {
      const double norm = sqrt(top * top + squares);
      image = top > 0 ? -norm : norm;
      tau = (image - top) / image;
      for (i64 row = pivot + 1 + threadIdx.x; row < rows; row += kBasisThreads) {
        own[row] = (T)(own[row] / (top - image));
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      taus[pivot] = tau;
      own[pivot] = (T)image;
    }
    reflect_later_columns(tau, columns, pivot, rows, rank);
  }
  if (panel.is_part()) {
    for (i64 i = threadIdx.x; i < rank * rank; i += kBasisThreads) {
      const i64 row = i / rank;
      const i64 column = i % rank;
      triangles[panel.triangle + i] = row <= column ? columns[column * rows + row] : (T)0;
    }
    __syncthreads();
  }
  for (i64 pivot = rank - 1; pivot >= 0; --pivot) {
    const double tau = taus[pivot];
    reflect_later_columns(tau, columns, pivot, rows, rank);
    T* const own = columns + pivot * rows;
    for (i64 row = threadIdx.x; row < rows; row += kBasisThreads) {
      own[row] = row < pivot ? (T)0 : row == pivot ? (T)(1 - tau) : (T)(-tau * own[row]);
    }
    __syncthreads();
  }
  if (!panel.is_part()) {
    panel.for_each(
        [&](i64 row, i64 column, i64 place) { basis[place] = columns[column * rows + row]; });
  }
}

// Multiplies the bases of panels, in `work`, with their rows of the bases of the stacked triangles.
// One block per panel. See Note [Tall factors].
template <typename T>
__global__ void __launch_bounds__(kBasisThreads)
    combine(const Panel* panels, const T* work, const T* triangles, T* basis) {
  const Panel panel = panels[blockIdx.x];
  if (!panel.is_part()) {
    return;
  }
  const T* const columns = work + panel.work;
  const T* const of_panel = triangles + panel.triangle;
  panel.for_each([&](i64 row, i64 column, i64 place) {
    double sum = 0;
    for (i64 f = 0; f < panel.rank; ++f) {
      sum += (double)columns[f * panel.rows + row] * of_panel[f * panel.rank + column];
    }
    basis[place] = (T)sum;
  });
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

// Computes P = M·Qᵀ of matrices of rank `max_rank` or less, and copies exact ranges. See Note [Tall
// and thin].
template <typename T, typename G, int max_rank>
__global__ void __launch_bounds__(kThreads, 2) project_left(
    const Matrix* matrices,
    i64 count,
    const T* errors,
    const G* bucket,
    const T* basis,
    i64 sent,
    T* own) {
  constexpr int size = Vector<T>::size;
  constexpr int together = 32 / max_rank;  // rows per warp, so that each lane ends with one sum
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
    for (int f = 0; f < max_rank; ++f) {
      if (f < matrix.rank) {
        const Vector<T> vector = load(right + f * columns, at, columns);
#pragma unroll
        for (int i = 0; i < together; ++i) {
          for (int j = 0; j < size; ++j) {
            T& sum = sums[i * max_rank + f];
            sum = fma(numbers[i].items[j], vector.items[j], sum);
          }
        }
      }
    }
  }
  const T sum = sum_by_lane(sums);
  const i64 row = first + lane / max_rank;
  const int f = lane % max_rank;
  if (row < rows && f < matrix.rank) {
    place_of_sums(matrix, kLeft, span, sent, own)[row * matrix.rank + f] = sum;
  }
}

// Computes Q = Pᵀ·M; otherwise as `project_left`.
template <typename T, typename G, int max_rank>
__global__ void __launch_bounds__(kThreads, 2) project_right(
    const Matrix* matrices,
    i64 count,
    const T* errors,
    const G* bucket,
    const T* basis,
    i64 sent,
    T* own) {
  constexpr int size = Vector<T>::size;
  constexpr int ahead = 32 / max_rank;  // rows that a thread loads before it multiplies the first
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
  Vector<T> sums[max_rank] = {};
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
      for (int f = 0; f < max_rank; ++f) {
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
  for (int f = 0; f < max_rank; ++f) {
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

// Copies each vector of `fresh`, except vectors of zeros, to `kept` if `all_finite` is true. The
// blocks (x, y, *) handle vector y of matrix x: a column of a left factor, a row of a right one.
// Each looks for a number other than zero from the start, and soon finds one, unless there is none.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    keep(const u8* all_finite, const Matrix* matrices, i64 side, const T* fresh, T* kept) {
  const Matrix& matrix = matrices[blockIdx.x];
  const i64 length = side == kLeft ? matrix.rows : matrix.columns;
  if (blockIdx.y >= matrix.rank || (i64)blockIdx.z * kThreads >= length) {
    return;
  }
  const i64 stride = side == kLeft ? matrix.rank : 1;
  const i64 start = matrix.factors[side].start + blockIdx.y * (side == kLeft ? 1 : length);
  bool is_alive = false;
  for (i64 first = 0; first < length && !is_alive; first += kThreads) {
    const i64 i = first + threadIdx.x;
    is_alive = __syncthreads_or(i < length && fresh[start + i * stride] != 0);
  }
  if (!is_alive || !*all_finite) {
    return;
  }
  const i64 step = (i64)gridDim.z * kThreads;
  for (i64 i = (i64)blockIdx.z * kThreads + threadIdx.x; i < length; i += step) {
    kept[start + i * stride] = fresh[start + i * stride];
  }
}

// The arguments of `apply`: half steps, whose factors lie `apart` elements apart, by side.
template <typename T, typename G>
struct Step {
  const u8* all_finite;
  const Matrix* matrices;
  i64 count;
  T* errors;  // may be null
  G* bucket;
  i64 halves;
  i64 apart[2];
  const T* own[2];   // of this rank, by side
  const T* mean[2];  // over all ranks
  const T* exact;    // the exact ranges, behind factors of `exact_side`
  i64 exact_side;
};

// Ends a step. With the sums over half steps of the products:
//
//   error = error + gradient - own left·own right      gradient = mean left·mean right
//
// If `all_finite` is false errors stay as they are and gradients become NaN. Results beyond the
// range of G are clamped, and the rest goes to the errors. A thread handles a vector of columns in
// kRows rows.
template <typename T, typename G>
__global__ void __launch_bounds__(kThreads) apply(Step<T, G> args) {
  constexpr int size = Vector<T>::size;
  const auto begins = [](const Matrix& matrix) { return matrix.first_block; };
  const Matrix matrix = find_matrix(args.matrices, args.count, blockIdx.x, begins);
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
  G* const gradient = args.bucket + matrix.gradient;
  const bool is_finite = *args.all_finite;
  const bool has_error = args.errors != nullptr && is_finite && rank > 0;
  T* const error = has_error ? args.errors + matrix.error : nullptr;
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
    mean[0] = load(args.exact + matrix.factors[args.exact_side].start, at, columns);
  }
  for (i64 half = 0; half < args.halves; ++half) {
    const i64 left = half * args.apart[kLeft] + matrix.factors[kLeft].start;
    const i64 right = half * args.apart[kRight] + matrix.factors[kRight].start;
    for (i64 f = 0; f < rank; ++f) {
      const Vector<T> own = load(args.own[kRight] + right + f * columns, at, columns);
      const Vector<T> of_all = load(args.mean[kRight] + right + f * columns, at, columns);
      for (int i = 0; i < kRows; ++i) {
        const i64 row = first + i < rows ? first + i : first;
        const T own_of_row = args.own[kLeft][left + row * rank + f];
        const T mean_of_row = args.mean[kLeft][left + row * rank + f];
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
