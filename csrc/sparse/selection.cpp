#include "sparse/selection.h"

#include "kernels/codecs/sparse.h"
#include "shared/instruction_sets.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

namespace commhooks {
namespace {

using codecs::magnitude_bits;

constexpr int64_t kWord = 64;        // elements per word of marks
constexpr int64_t kBlock = 1 << 10;  // elements whose flags stay in the first-level cache
constexpr int64_t kChunk = 1 << 16;  // elements that a thread takes at a time
constexpr int64_t kSamples = 1 << 16;

template <typename T>
using Key = decltype(magnitude_bits(T{}));

// Packs eight bytes, each 0 or 1, into eight bits: the product moves byte i to bit 56 + i.
COMMHOOKS_INLINE uint64_t gather_bits(const uint8_t* flags) {
  uint64_t bytes;
  std::memcpy(&bytes, flags, sizeof(bytes));
  return bytes * 0x0102040810204080ull >> 56;
}

// Adds `error`, and sets bit i of `marks` if the magnitude of sum i is at least `bound`. Returns
// the number of marks.
template <typename T>
COMMHOOKS_INLINE int64_t mark(
    T* __restrict gradient,
    const T* __restrict error,
    int64_t numel,
    Key<T> bound,
    uint64_t* marks) {
  int64_t marked = 0;
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t count = std::min(kBlock, numel - begin);
    T* const sums = gradient + begin;
    if (error != nullptr) {
      for (int64_t i = 0; i < count; ++i) {
        sums[i] += error[begin + i];
      }
    }
    uint8_t flags[kBlock];
    for (int64_t i = 0; i < count; ++i) {
      flags[i] = magnitude_bits(sums[i]) >= bound;
    }
    const int64_t words = (count + kWord - 1) / kWord;
    for (int64_t i = count; i < words * kWord; ++i) {
      flags[i] = 0;
    }
    for (int64_t word = 0; word < words; ++word) {
      uint64_t bits = 0;
      for (int64_t i = 0; i < kWord; i += 8) {
        bits |= gather_bits(flags + word * kWord + i) << i;
      }
      marks[begin / kWord + word] = bits;
      marked += std::popcount(bits);
    }
  }
  return marked;
}

at::Tensor empty_indices(int64_t count) {
  return at::empty({count}, at::kInt);
}

// Writes the positions of the bits that are set in words [first, last).
void list_marks(const std::vector<uint64_t>& words, int64_t first, int64_t last, int32_t* out) {
  for (int64_t word = first; word < last; ++word) {
    for (uint64_t bits = words[word]; bits != 0; bits &= bits - 1) {
      *out++ = static_cast<int32_t>(word * kWord + std::countr_zero(bits));
    }
  }
}

// The elements of a tensor with a magnitude of at least `bound`, one bit per element.
class Marks {
 public:
  template <typename T>
  Marks(T* gradient, const T* error, int64_t numel, Key<T> bound)
      : words_(static_cast<size_t>((numel + kWord - 1) / kWord)),
        ends_(static_cast<size_t>((numel + kChunk - 1) / kChunk)) {
    at::parallel_for(0, std::ssize(ends_), 1, [&](int64_t first, int64_t last) {
      for (int64_t chunk = first; chunk < last; ++chunk) {
        const int64_t begin = chunk * kChunk;
        ends_[chunk] = on_widest([&](auto) COMMHOOKS_ALWAYS_INLINE {
          return mark(
              gradient + begin, error == nullptr ? nullptr : error + begin,
              std::min(kChunk, numel - begin), bound, &words_[begin / kWord]);
        });
      }
    });
    std::partial_sum(ends_.begin(), ends_.end(), ends_.begin());
  }

  int64_t count() const {
    return ends_.empty() ? 0 : ends_.back();
  }

  at::Tensor indices() const {
    at::Tensor found = empty_indices(count());
    auto* const out = found.data_ptr<int32_t>();
    at::parallel_for(0, std::ssize(ends_), 1, [&](int64_t first, int64_t last) {
      list_marks(
          words_, first * kChunk / kWord,
          std::min<int64_t>(last * kChunk / kWord, std::ssize(words_)),
          out + (first == 0 ? 0 : ends_[first - 1]));
    });
    return found;
  }

 private:
  std::vector<uint64_t> words_;
  std::vector<int64_t> ends_;  // marks up to the end of each chunk
};

// Returns the k-th largest, from 1, of the keys `key_at(0)` to `key_at(count - 1)`. Finds its
// digits from the highest one on; each pass reads the keys that have the digits found so far.
template <typename KeyAt>
auto kth_largest(int64_t count, int64_t k, const KeyAt& key_at) {
  using K = decltype(key_at(0));
  K found = 0;
  for (int shift = std::numeric_limits<K>::digits; shift > 0;) {
    const int width = std::min(11, shift);
    shift -= width;
    std::array<int64_t, 1 << 11> histogram{};
    for (int64_t i = 0; i < count; ++i) {
      const K key = key_at(i);
      if (key >> shift >> width == found >> shift >> width) {
        ++histogram[key >> shift & ((K{1} << width) - 1)];
      }
    }
    K digit = (K{1} << width) - 1;
    while (k > histogram[digit]) {
      k -= histogram[digit--];
    }
    found |= digit << shift;
  }
  return found;
}

// Estimates from a sample a bound that slightly more than `count` elements are likely to reach;
// never 0, so that zeros are not marked. The sample has one element of each of kSamples runs, at
// pseudorandom places that do not follow a pattern in the gradient.
template <typename T>
Key<T> sample_bound(const T* gradient, const T* error, int64_t numel, int64_t count) {
  if (numel <= kSamples) {
    return 1;
  }
  std::vector<Key<T>> keys(kSamples);
  for (int64_t i = 0; i < kSamples; ++i) {
    const int64_t begin = i * numel / kSamples;
    const int64_t end = (i + 1) * numel / kSamples;
    const uint64_t hash = static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15ull;  // Weyl's sequence
    const int64_t at =
        begin + static_cast<int64_t>((hash >> 32) % static_cast<uint64_t>(end - begin));
    keys[i] = magnitude_bits(error == nullptr ? gradient[at] : gradient[at] + error[at]);
  }
  // Four standard deviations of the number of samples above the `count`-th largest element.
  const double expected = static_cast<double>(count) / numel * kSamples;
  const auto rank = static_cast<int64_t>(expected + 4 * std::sqrt(expected) + 8);
  const auto bound =
      kth_largest(kSamples, std::min(rank, kSamples), [&](int64_t i) { return keys[i]; });
  return std::max<Key<T>>(bound, 1);
}

// Writes the `count` largest of the ascending `candidates`; among equal ones, the first. Returns
// the smallest key that it wrote.
template <typename T>
Key<T> write_largest(
    const T* gradient, std::span<const int32_t> candidates, int64_t count, int32_t* to) {
  std::vector<Key<T>> keys(candidates.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = magnitude_bits(gradient[candidates[i]]);
  }
  const auto smallest = kth_largest(std::ssize(keys), count, [&](int64_t i) { return keys[i]; });
  const auto above =
      std::count_if(keys.begin(), keys.end(), [&](auto key) { return key > smallest; });
  int64_t equal = count - above;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (keys[i] > smallest || (keys[i] == smallest && equal-- > 0)) {
      *to++ = candidates[i];
    }
  }
  return smallest;
}

// Adds the first zeros to `found`, which has all non-zeros, until there are `count` indices.
at::Tensor add_zeros(const at::Tensor& found, int64_t count) {
  const auto* from = found.data_ptr<int32_t>();
  const auto* const end = from + found.numel();
  at::Tensor kept = empty_indices(count);
  auto* to = kept.data_ptr<int32_t>();
  int64_t zeros = count - found.numel();
  for (int32_t index = 0; zeros > 0; ++index) {
    if (from != end && *from == index) {
      ++from;
    } else {
      --zeros;
    }
    *to++ = index;
  }
  std::copy(from, end, to);
  return kept;
}

template <typename T>
at::Tensor largest(T* gradient, const T* error, int64_t numel, int64_t count) {
  // If the sample was not representative, or many elements are equal, the bound is computed
  // exactly.
  const int64_t max_marks = 4 * count + kSamples;
  const auto bound = sample_bound(gradient, error, numel, count);
  Marks marks(gradient, error, numel, bound);
  const bool too_few = marks.count() < count && bound > 1;
  if (too_few || marks.count() > max_marks) {
    const auto exact =
        kth_largest(numel, count, [&](int64_t i) { return magnitude_bits(gradient[i]); });
    marks = Marks(gradient, static_cast<const T*>(nullptr), numel, std::max<Key<T>>(exact, 1));
  }
  const at::Tensor found = marks.indices();
  if (marks.count() <= count) {
    return marks.count() == count ? found : add_zeros(found, count);
  }
  at::Tensor kept = empty_indices(count);
  const std::span from(found.data_ptr<int32_t>(), static_cast<size_t>(found.numel()));
  write_largest<T>(gradient, from, count, kept.data_ptr<int32_t>());
  return kept;
}

// Selects from chunks one after the other. Neighbors are alike, so a bound from the previous chunk
// leaves few candidates; where it does not, the chunk's own is computed.
template <typename T>
class ChunkSelection {
 public:
  ChunkSelection(int64_t chunk, int64_t count)
      : count_(count), words_(static_cast<size_t>((chunk + kWord - 1) / kWord)) {}

  // Writes the largest of the elements [begin, begin + numel), after adding `error`.
  void write(T* gradient, const T* error, int64_t begin, int64_t numel, int32_t* to) {
    const int64_t count = std::min(count_, numel);
    T* const sums = gradient + begin;
    int64_t marked = mark_chunk(sums, error == nullptr ? nullptr : error + begin, numel);
    if (marked < count || marked > 4 * count + kWord) {
      bound_ = kth_largest(numel, count, [&](int64_t i) { return magnitude_bits(sums[i]); });
      marked = mark_chunk(sums, nullptr, numel);
    }
    candidates_.resize(static_cast<size_t>(marked));
    list_marks(words_, 0, (numel + kWord - 1) / kWord, candidates_.data());
    const Key<T> smallest = write_largest<T>(sums, candidates_, count, to);
    std::for_each(to, to + count, [&](int32_t& index) { index += static_cast<int32_t>(begin); });
    constexpr Key<T> kMargin = Key<T>{1}
        << (std::numeric_limits<T>::digits - 3);  // a quarter octave
    bound_ = smallest > kMargin ? smallest - kMargin : 0;
  }

 private:
  int64_t mark_chunk(T* sums, const T* error, int64_t numel) {
    return on_widest([&](auto) COMMHOOKS_ALWAYS_INLINE {
      return mark(sums, error, numel, bound_, words_.data());
    });
  }

  int64_t count_;
  Key<T> bound_ = std::numeric_limits<Key<T>>::max();
  std::vector<uint64_t> words_;
  std::vector<int32_t> candidates_;
};

template <typename T>
at::Tensor largest_of_chunks(
    T* gradient, const T* error, int64_t numel, int64_t chunk, int64_t count) {
  const int64_t chunks = (numel + chunk - 1) / chunk;
  const int64_t rest = numel % chunk;
  at::Tensor found = empty_indices(numel / chunk * count + std::min(count, rest));
  auto* const to = found.data_ptr<int32_t>();
  const int64_t grain = std::max<int64_t>(1, kChunk / chunk);
  at::parallel_for(0, chunks, grain, [&](int64_t first, int64_t last) {
    ChunkSelection<T> selection(chunk, count);
    for (int64_t i = first; i < last; ++i) {
      selection.write(
          gradient, error, i * chunk, std::min(chunk, numel - i * chunk), to + i * count);
    }
  });
  return found;
}

// Calls `body(gradient, error)` with typed pointers; `error` is null if there are no errors.
template <typename Body>
at::Tensor dispatch(
    at::Tensor& gradient, const std::optional<at::Tensor>& error, const Body& body) {
  if (gradient.scalar_type() == at::kFloat) {
    return body(gradient.data_ptr<float>(), error ? error->const_data_ptr<float>() : nullptr);
  }
  return body(gradient.data_ptr<double>(), error ? error->const_data_ptr<double>() : nullptr);
}

}  // namespace

at::Tensor select_largest(
    at::Tensor& gradient, const std::optional<at::Tensor>& error, int64_t count) {
  return dispatch(gradient, error, [&]<typename T>(T* sums, const T* errors) {
    return largest(sums, errors, gradient.numel(), count);
  });
}

at::Tensor select_largest_of_chunks(
    at::Tensor& gradient, const std::optional<at::Tensor>& error, int64_t chunk, int64_t count) {
  return dispatch(gradient, error, [&]<typename T>(T* sums, const T* errors) {
    return largest_of_chunks(sums, errors, gradient.numel(), chunk, count);
  });
}

at::Tensor select_above(
    at::Tensor& gradient, const std::optional<at::Tensor>& error, double threshold) {
  return dispatch(gradient, error, [&]<typename T>(T* sums, const T* errors) {
    const auto bound = std::max<Key<T>>(magnitude_bits(static_cast<T>(threshold)), 1);
    return Marks(sums, errors, gradient.numel(), bound).indices();
  });
}

}  // namespace commhooks
