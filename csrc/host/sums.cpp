#include "host/sums.h"

#include "packing/elements.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>

namespace commhooks {
namespace {

// Elements that are summed over all ranks before the next ones: they stay in the innermost cache.
constexpr int64_t kTile = 2048;
constexpr int64_t kGrain = 1 << 15;  // elements worth a thread

// Reads the numbers of a dtype into an accumulator, and writes them back.
template <typename Number>
struct Direct {
  using Stored = Number;
  using Accumulator = Number;
  static const Number* read(const Number* in, Number* /*room*/, int64_t /*numel*/) {
    return in;
  }
  static void write(const Number* in, Number* out, int64_t numel, double scale) {
    const auto factor = static_cast<Number>(scale);
    for (int64_t i = 0; i < numel; ++i) {
      out[i] = in[i] * factor;
    }
  }
};

// In fp32, and rounded to half precision on both ways.
template <typename Number, typename Half>
struct Rounded {
  using Stored = Number;
  using Accumulator = float;
  static const float* read(const Number* in, float* room, int64_t numel) {
    using Via = std::conditional_t<std::is_same_v<Number, Half>, float, Half>;
    convert_elements<Number, float, Via>(in, room, numel, 1.0);
    return room;
  }
  static void write(const float* in, Number* out, int64_t numel, double scale) {
    convert_elements<float, Number, Half>(in, out, numel, scale);
  }
};

template <typename Number>
void add(const Number* a, const Number* b, Number* out, int64_t numel) {
  on_widest([&](auto) COMMHOOKS_ALWAYS_INLINE {
#pragma GCC ivdep
    for (int64_t i = 0; i < numel; ++i) {
      out[i] = a[i] + b[i];
    }
  });
}

template <typename Format>
void sum_tiles(
    const std::vector<const void*>& sources,
    void* destination,
    int64_t begin,
    int64_t end,
    double scale) {
  using Stored = typename Format::Stored;
  using Accumulator = typename Format::Accumulator;
  std::array<Accumulator, kTile> total;
  std::array<Accumulator, kTile> first_room;
  std::array<Accumulator, kTile> room;
  for (int64_t start = begin; start < end; start += kTile) {
    const int64_t numel = std::min(kTile, end - start);
    const auto tile = [&](size_t rank, Accumulator* space) {
      return Format::read(static_cast<const Stored*>(sources[rank]) + start, space, numel);
    };
    const Accumulator* sum = tile(0, first_room.data());
    for (size_t rank = 1; rank < sources.size(); ++rank) {
      add(sum, tile(rank, room.data()), total.data(), numel);
      sum = total.data();
    }
    Format::write(sum, static_cast<Stored*>(destination) + start, numel, scale);
  }
}

}  // namespace

void sum(
    const std::vector<const void*>& sources,
    void* destination,
    int64_t numel,
    c10::ScalarType dtype,
    c10::ScalarType wire_dtype,
    double scale) {
  with_type(dtype, [&]<typename Stored>() {
    with_type(wire_dtype, [&]<typename Wire>() {
      using Rounding = std::conditional_t<sizeof(Wire) == 2, Wire, Stored>;
      using Format =
          std::conditional_t<sizeof(Rounding) == 2, Rounded<Stored, Rounding>, Direct<Stored>>;
      at::parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) {
        sum_tiles<Format>(sources, destination, begin, end, scale);
      });
    });
  });
}

}  // namespace commhooks
