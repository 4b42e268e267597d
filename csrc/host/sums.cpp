#include "host/sums.h"

#include "packing/half.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>

namespace commhooks {
namespace {

// Elements that are summed over all ranks before the next ones: they stay in the innermost cache.
constexpr int64_t kTile = 2048;
constexpr int64_t kGrain = 1 << 15;  // elements worth a thread

// How the numbers of a dtype are read into an accumulator, and written back.
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

using Conversion = void (*)(const void*, void*, int64_t, double);

template <Conversion to_float, Conversion from_float>
struct Converted {
  using Stored = uint16_t;
  using Accumulator = float;
  static const float* read(const uint16_t* in, float* room, int64_t numel) {
    to_float(in, room, numel, 1.0);
    return room;
  }
  static void write(const float* in, uint16_t* out, int64_t numel, double scale) {
    from_float(in, out, numel, scale);
  }
};

template <typename Number>
void add(const Number* a, const Number* b, Number* out, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    out[i] = a[i] + b[i];
  }
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

template <typename Format>
void sum_as(
    const std::vector<const void*>& sources, void* destination, int64_t numel, double scale) {
  at::parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) {
    sum_tiles<Format>(sources, destination, begin, end, scale);
  });
}

}  // namespace

void sum(
    const std::vector<const void*>& sources,
    void* destination,
    int64_t numel,
    c10::ScalarType dtype,
    double scale) {
  switch (dtype) {
    case c10::kFloat:
      return sum_as<Direct<float>>(sources, destination, numel, scale);
    case c10::kDouble:
      return sum_as<Direct<double>>(sources, destination, numel, scale);
    case c10::kHalf:
      return sum_as<Converted<half_to_float, float_to_half>>(sources, destination, numel, scale);
    case c10::kBFloat16:
      return sum_as<Converted<bfloat16_to_float, float_to_bfloat16>>(
          sources, destination, numel, scale);
    default:
      TORCH_INTERNAL_ASSERT(false, "Packing does not take ", dtype);
  }
}

}  // namespace commhooks
