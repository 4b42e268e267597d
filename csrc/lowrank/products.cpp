#include "lowrank/products.h"

#include "shared/instruction_sets.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace commhooks {
namespace {

// A vector of the width of the widest registers; the compiler splits it for other CPUs.
constexpr int64_t kLanes = 16;
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));

// Rows that are handled together, so that each load of the right factors is used for all of them.
constexpr int64_t kRows = 4;
// Factors that are handled together: kRows * kFactors sums stay in registers.
constexpr int64_t kFactors = 4;
// Elements of a panel: columns of the right factors that stay in the first-level cache for all
// rows.
constexpr int64_t kPanelElements = 1 << 12;
constexpr int64_t kGrainElements = 1 << 15;

// One matrix. `error` may be null.
struct Matrix {
  float* error;
  float* gradient;
  int64_t rows;
  int64_t columns;
  int64_t rank;
};

// `count` < kLanes at the end of a row.
COMMHOOKS_INLINE Lanes load(const float* from, int64_t count) {
  Lanes lanes = {};
  if (count >= kLanes) {
    std::memcpy(&lanes, from, sizeof(lanes));
  } else {
    std::memcpy(&lanes, from, static_cast<size_t>(count) * sizeof(float));
  }
  return lanes;
}

COMMHOOKS_INLINE void store(float* to, const Lanes& lanes, int64_t count) {
  if (count >= kLanes) {
    std::memcpy(to, &lanes, sizeof(lanes));
  } else {
    std::memcpy(to, &lanes, static_cast<size_t>(count) * sizeof(float));
  }
}

COMMHOOKS_INLINE Lanes load_sum(const Matrix& matrix, int64_t at, int64_t count) {
  const Lanes gradient = load(matrix.gradient + at, count);
  return matrix.error == nullptr ? gradient : load(matrix.error + at, count) + gradient;
}

COMMHOOKS_INLINE float sum(const Lanes& lanes) {
  float total = 0;
  for (int64_t i = 0; i < kLanes; ++i) {
    total += lanes[i];
  }
  return total;
}

// Calls `body` with the number of rows as a constant, for blocks of at most kRows rows of
// [begin, end).
template <typename Body>
COMMHOOKS_INLINE void for_rows(int64_t begin, int64_t end, const Body& body) {
  int64_t row = begin;
  for (; row + kRows <= end; row += kRows) {
    body.template operator()<kRows>(row);
  }
  for (; row < end; ++row) {
    body.template operator()<1>(row);
  }
}

// The same for blocks of at most kRows rows and at most kFactors factors of [0, rank). Rows are the
// outer loop: their elements are in the first-level cache for the next block of factors.
template <typename Body>
COMMHOOKS_INLINE void for_blocks(int64_t begin, int64_t end, int64_t rank, const Body& body) {
  for_rows(begin, end, [&]<int64_t rows>(int64_t row) COMMHOOKS_ALWAYS_INLINE {
    int64_t factor = 0;
    for (; factor + kFactors <= rank; factor += kFactors) {
      body.template operator()<rows, kFactors>(row, factor);
    }
    for (; factor < rank; ++factor) {
      body.template operator()<rows, 1>(row, factor);
    }
  });
}

COMMHOOKS_INLINE void project_left_rows(
    const Matrix& matrix, const float* right, float* left, int64_t begin, int64_t end) {
  const int64_t columns = matrix.columns;
  const int64_t rank = matrix.rank;
  for_blocks(
      begin, end, rank,
      [&]<int64_t rows, int64_t factors>(int64_t row, int64_t factor) COMMHOOKS_ALWAYS_INLINE {
        Lanes sums[rows][factors] = {};
        for (int64_t column = 0; column < columns; column += kLanes) {
          const int64_t count = columns - column;
          Lanes m[rows];
          for (int64_t i = 0; i < rows; ++i) {
            m[i] = load_sum(matrix, (row + i) * columns + column, count);
          }
          for (int64_t f = 0; f < factors; ++f) {
            const Lanes q = load(right + (factor + f) * columns + column, count);
            for (int64_t i = 0; i < rows; ++i) {
              sums[i][f] += m[i] * q;
            }
          }
        }
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t f = 0; f < factors; ++f) {
            left[(row + i) * rank + factor + f] = sum(sums[i][f]);
          }
        }
      });
}

// Columns [begin, end) of the right factors.
COMMHOOKS_INLINE void project_right_columns(
    const Matrix& matrix, const float* left, float* right, int64_t begin, int64_t end) {
  const int64_t columns = matrix.columns;
  const int64_t rank = matrix.rank;
  for (int64_t factor = 0; factor < rank; ++factor) {
    std::fill(right + factor * columns + begin, right + factor * columns + end, 0.0f);
  }
  for_blocks(
      0, matrix.rows, rank,
      [&]<int64_t rows, int64_t factors>(int64_t row, int64_t factor) COMMHOOKS_ALWAYS_INLINE {
        for (int64_t column = begin; column < end; column += kLanes) {
          const int64_t count = end - column;
          Lanes m[rows];
          for (int64_t i = 0; i < rows; ++i) {
            m[i] = load_sum(matrix, (row + i) * columns + column, count);
          }
          for (int64_t f = 0; f < factors; ++f) {
            float* at = right + (factor + f) * columns + column;
            Lanes q = load(at, count);
            for (int64_t i = 0; i < rows; ++i) {
              q += left[(row + i) * rank + factor + f] * m[i];
            }
            store(at, q, count);
          }
        }
      });
}

// `known_rank`: 0, or the rank, so that the compiler knows the length of the inner loops.
template <int64_t known_rank>
COMMHOOKS_INLINE void apply_rows(
    const Matrix& matrix,
    const float* own_left,
    const float* own_right,
    const float* mean_left,
    const float* mean_right,
    int64_t begin,
    int64_t end) {
  const int64_t columns = matrix.columns;
  const int64_t rank = known_rank > 0 ? known_rank : matrix.rank;
  const int64_t panel = std::max<int64_t>(1, kPanelElements / (kLanes * rank)) * kLanes;
  for (int64_t start = 0; start < columns; start += panel) {
    const int64_t stop = std::min(columns, start + panel);
    for_rows(begin, end, [&]<int64_t rows>(int64_t row) COMMHOOKS_ALWAYS_INLINE {
      for (int64_t column = start; column < stop; column += kLanes) {
        const int64_t count = stop - column;
        Lanes error[rows] = {};
        Lanes result[rows] = {};
        if (matrix.error != nullptr) {
          for (int64_t i = 0; i < rows; ++i) {
            error[i] = load_sum(matrix, (row + i) * columns + column, count);
          }
        }
#pragma GCC unroll 4
        for (int64_t f = 0; f < rank; ++f) {
          const Lanes own = load(own_right + f * columns + column, count);
          const Lanes mean = load(mean_right + f * columns + column, count);
          for (int64_t i = 0; i < rows; ++i) {
            error[i] -= own_left[(row + i) * rank + f] * own;
            result[i] += mean_left[(row + i) * rank + f] * mean;
          }
        }
        for (int64_t i = 0; i < rows; ++i) {
          const int64_t at = (row + i) * columns + column;
          if (matrix.error != nullptr) {
            store(matrix.error + at, error[i], count);
          }
          store(matrix.gradient + at, result[i], count);
        }
      }
    });
  }
}

struct Batch {
  Batch(const std::optional<at::Tensor>& error, const at::Tensor& gradient, int64_t rank)
      : count(gradient.size(0)),
        rows(gradient.size(1)),
        columns(gradient.size(2)),
        rank(rank),
        spacing(gradient.stride(0)),
        error(error ? error->data_ptr<float>() : nullptr),
        gradient(gradient.data_ptr<float>()) {}

  Matrix operator[](int64_t index) const {
    float* const own_error = error == nullptr ? nullptr : error + index * rows * columns;
    return {own_error, gradient + index * spacing, rows, columns, rank};
  }

  // Calls `body(index, begin, end)` in parallel, for parts of the range [0, extent) of each matrix;
  // parts begin at multiples of `unit`, so that they do not share vectors or blocks.
  template <typename Body>
  void in_parallel(int64_t extent, int64_t unit, const Body& body) const {
    const int64_t units = (extent + unit - 1) / unit;
    const int64_t elements_per_unit =
        std::max<int64_t>(1, rows * columns / std::max<int64_t>(1, units));
    const int64_t grain = std::max<int64_t>(1, kGrainElements / elements_per_unit);
    at::parallel_for(0, count * units, grain, [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const int64_t index = begin / units;
        const int64_t stop = std::min(end, (index + 1) * units);
        body(
            index, (begin - index * units) * unit, std::min(extent, (stop - index * units) * unit));
        begin = stop;
      }
    });
  }

  int64_t count;
  int64_t rows;
  int64_t columns;
  int64_t rank;
  int64_t spacing;
  float* error;
  float* gradient;
};

void check(
    const char* name, const at::Tensor& tensor, at::IntArrayRef shape, bool rows_only = false) {
  TORCH_CHECK(
      tensor.device().is_cpu() && tensor.scalar_type() == c10::kFloat, "Expected ", name,
      " to be float32 on the CPU, found ", tensor.scalar_type(), " on ", tensor.device(), ".");
  TORCH_CHECK(
      tensor.sizes() == shape, "Expected ", name, " of shape ", shape, ", found ", tensor.sizes(),
      ".");
  TORCH_CHECK(
      rows_only ? tensor.stride(2) == 1 && tensor.stride(1) == tensor.size(2)
                : tensor.is_contiguous(),
      "Expected ", name, " to be contiguous, found strides ", tensor.strides(), ".");
}

void check_matrices(const std::optional<at::Tensor>& error, const at::Tensor& gradient) {
  TORCH_CHECK(gradient.dim() == 3, "Expected gradients (k, n, m), found ", gradient.sizes(), ".");
  check("gradient", gradient, gradient.sizes(), /*rows_only=*/true);
  if (error) {
    check("error", *error, gradient.sizes());
  }
}

void check_factors(const at::Tensor& gradient, const at::Tensor& left, const at::Tensor& right) {
  TORCH_CHECK(left.dim() == 3, "Expected left factors (k, n, r), found ", left.sizes(), ".");
  check("the left factors", left, {gradient.size(0), gradient.size(1), left.size(2)});
  check("the right factors", right, {gradient.size(0), left.size(2), gradient.size(2)});
}

}  // namespace

void project_left(
    const std::optional<at::Tensor>& error,
    const at::Tensor& gradient,
    const at::Tensor& right,
    at::Tensor& left) {
  check_matrices(error, gradient);
  check_factors(gradient, left, right);
  const Batch batch(error, gradient, left.size(2));
  const float* const from = right.data_ptr<float>();
  float* const to = left.data_ptr<float>();
  batch.in_parallel(batch.rows, kRows, [&](int64_t index, int64_t begin, int64_t end) {
    on_widest([&](auto) COMMHOOKS_ALWAYS_INLINE {
      project_left_rows(
          batch[index], from + index * batch.rank * batch.columns,
          to + index * batch.rank * batch.rows, begin, end);
    });
  });
}

void project_right(
    const std::optional<at::Tensor>& error,
    const at::Tensor& gradient,
    const at::Tensor& left,
    at::Tensor& right) {
  check_matrices(error, gradient);
  check_factors(gradient, left, right);
  const Batch batch(error, gradient, left.size(2));
  const float* const from = left.data_ptr<float>();
  float* const to = right.data_ptr<float>();
  batch.in_parallel(batch.columns, kLanes, [&](int64_t index, int64_t begin, int64_t end) {
    on_widest([&](auto) COMMHOOKS_ALWAYS_INLINE {
      project_right_columns(
          batch[index], from + index * batch.rank * batch.rows,
          to + index * batch.rank * batch.columns, begin, end);
    });
  });
}

void apply_factors(
    std::optional<at::Tensor> error,
    at::Tensor& gradient,
    const at::Tensor& own_left,
    const at::Tensor& own_right,
    const at::Tensor& mean_left,
    const at::Tensor& mean_right) {
  check_matrices(error, gradient);
  check_factors(gradient, own_left, own_right);
  check_factors(gradient, mean_left, mean_right);
  TORCH_CHECK(
      own_left.size(2) == mean_left.size(2), "Expected factors of one rank, found ",
      own_left.size(2), " and ", mean_left.size(2), ".");
  const Batch batch(error, gradient, own_left.size(2));
  const int64_t left_size = batch.rank * batch.rows;
  const int64_t right_size = batch.rank * batch.columns;
  const float* const P = own_left.data_ptr<float>();
  const float* const Q = own_right.data_ptr<float>();
  const float* const mean_P = mean_left.data_ptr<float>();
  const float* const mean_Q = mean_right.data_ptr<float>();
  batch.in_parallel(batch.rows, kRows, [&](int64_t index, int64_t begin, int64_t end) {
    on_widest([&](auto) COMMHOOKS_ALWAYS_INLINE {
      const auto apply = [&]<int64_t known_rank>() COMMHOOKS_ALWAYS_INLINE {
        apply_rows<known_rank>(
            batch[index], P + index * left_size, Q + index * right_size, mean_P + index * left_size,
            mean_Q + index * right_size, begin, end);
      };
      batch.rank == 4 ? apply.template operator()<4>() : apply.template operator()<0>();
    });
  });
}

}  // namespace commhooks
