#include "packing/convert.h"

#include "packing/elements.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

namespace commhooks {
namespace {

// The least work for one thread: about 10 microseconds of copying.
constexpr int64_t kGrainElements = 1 << 15;

// Few enough to be in the innermost cache when they are checked.
constexpr int64_t kTileElements = 1 << 11;

using Kernel = void (*)(const void* source, void* destination, int64_t numel, double scale);

Kernel choose_kernel(c10::ScalarType from, c10::ScalarType to) {
  return with_type(from, [&]<typename From>() {
    return with_type(to, []<typename To>() -> Kernel { return convert_elements<From, To>; });
  });
}

// Whether `numel` consecutive numbers are finite. Infinity and NaN have an exponent with all bits
// set, and infinity no other bits.
bool all_finite(const void* numbers, int64_t numel, c10::ScalarType type) {
  return with_type(type, [&]<typename T>() {
    using Bits = std::conditional_t<
        sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
    const T infinity = std::numeric_limits<T>::infinity();
    Bits exponent;
    std::memcpy(&exponent, &infinity, sizeof(exponent));
    const auto* bytes = static_cast<const char*>(numbers);
    return on_widest([=](auto) COMMHOOKS_ALWAYS_INLINE {
      Bits found = 0;
      for (int64_t i = 0; i < numel; ++i) {
        Bits bits;
        std::memcpy(&bits, bytes + i * sizeof(bits), sizeof(bits));
        found |= static_cast<Bits>((bits & exponent) == exponent);
      }
      return found == 0;
    });
  });
}

// Converts consecutive numbers. If asked to check, `run` returns whether all written numbers are
// finite.
class Conversion {
 public:
  Conversion(c10::ScalarType from, c10::ScalarType to, double scale, bool stream, bool checks)
      : to_(to),
        from_size_(static_cast<int64_t>(c10::elementSize(from))),
        to_size_(static_cast<int64_t>(c10::elementSize(to))),
        scale_(scale),
        checks_(checks),
        // Numbers are checked where they were written, so they have to be in a cache there.
        streams_(stream && !checks),
        copies_(from == to && scale == 1.0),
        kernel_(choose_kernel(from, to)) {}

  bool run(const char* source, char* destination, int64_t numel) const {
    if (!checks_) {
      write(source, destination, numel);
      return true;
    }
    bool finite = true;
    for (int64_t start = 0; start < numel; start += kTileElements) {
      const int64_t tile = std::min(kTileElements, numel - start);
      char* out = destination + start * to_size_;
      write(source + start * from_size_, out, tile);
      finite &= all_finite(out, tile, to_);
    }
    return finite;
  }

 private:
  void write(const char* source, char* destination, int64_t numel) const {
    // Numbers that are converted in place have just been read, so they are in a cache.
    const bool is_in_place = source == destination;
    const bool streams = streams_ && !is_in_place;
    const auto bytes = static_cast<size_t>(numel * to_size_);
    if (!copies_) {
      const bool has_streaming = kernel_ == convert_elements<float, float>;
      const Kernel kernel = streams && has_streaming ? scale_streaming : kernel_;
      kernel(source, destination, numel, scale_);
    } else if (streams) {
      stream_bytes(source, destination, bytes);
    } else if (!is_in_place) {
      std::memcpy(destination, source, bytes);
    }
  }

  c10::ScalarType to_;
  int64_t from_size_;
  int64_t to_size_;
  double scale_;
  bool checks_;
  bool streams_;
  bool copies_;
  Kernel kernel_;
};

}  // namespace

void convert(
    const std::vector<Piece>& pieces,
    c10::ScalarType from,
    c10::ScalarType to,
    double scale,
    bool stream,
    bool* finite) {
  if (pieces.empty()) {
    return;
  }
  const Conversion conversion(from, to, scale, stream, finite != nullptr);
  const size_t from_size = c10::elementSize(from);
  const size_t to_size = c10::elementSize(to);
  std::atomic<bool> all_finite{true};

  // ends[i]: number of elements up to and including piece i. The concatenated pieces are divided
  // into equal ranges.
  std::vector<int64_t> ends;
  ends.reserve(pieces.size());
  int64_t total = 0;
  for (const auto& piece : pieces) {
    ends.push_back(total += piece.numel);
  }

  at::parallel_for(0, total, kGrainElements, [&](int64_t begin, int64_t end) {
    size_t i = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    while (begin < end) {
      const Piece& piece = pieces[i];
      const int64_t start = begin - (ends[i] - piece.numel);
      const int64_t numel = std::min(end, ends[i]) - begin;
      auto* destination = static_cast<char*>(piece.destination) + start * to_size;
      if (piece.source == nullptr) {
        std::memset(destination, 0, static_cast<size_t>(numel) * to_size);
      } else {
        const auto* source = static_cast<const char*>(piece.source) + start * from_size;
        if (!conversion.run(source, destination, numel)) {
          all_finite = false;
        }
      }
      begin += numel;
      ++i;
    }
  });
  if (!all_finite) {
    *finite = false;
  }
}

}  // namespace commhooks
