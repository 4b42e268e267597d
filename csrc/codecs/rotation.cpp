#include "codecs/rotation.h"

#include "codecs/blocks.h"
#include "kernels/codecs/rotation.h"

#include <ATen/Parallel.h>

namespace commhooks {
namespace {

constexpr int64_t kBlock = codecs::kRotation;
constexpr int64_t kGrain = 256;  // the least number of blocks for one thread

// Replaces numbers that are `h` lanes apart by their sums and differences.
template <typename Set, int h>
COMMHOOKS_INLINE auto combine_lanes(typename Vectors<Set>::Floats x) {
  using Floats = typename Vectors<Set>::Floats;
  using Words = typename Vectors<Set>::Words;
  const auto partner = for_lanes<typename Vectors<Set>::Ints>([](int lane) { return lane ^ h; });
  const auto signs = for_lanes<Words>([](int lane) { return (lane & h) != 0 ? 0x80000000u : 0u; });
  const auto signed_x = reinterpret_cast<Floats>(reinterpret_cast<Words>(x) ^ signs);
  return __builtin_shuffle(x, partner) + signed_x;
}

template <typename Set, int h = 1>
COMMHOOKS_INLINE void combine_all_lanes(typename Vectors<Set>::Floats& x) {
  if constexpr (h < Set::kFloats) {
    x = combine_lanes<Set, h>(x);
    combine_all_lanes<Set, 2 * h>(x);
  }
}

// The signs of the numbers from `place` on.
template <typename Set>
COMMHOOKS_INLINE auto signs_from(uint32_t place) {
  using Words = typename Vectors<Set>::Words;
  const auto lanes = for_lanes<Words>([](int lane) { return static_cast<uint32_t>(lane); });
  return codecs::rotation_sign<Words>(lanes + place);
}

// Rotates a whole block in registers.
template <typename Set>
COMMHOOKS_INLINE void rotate_block(
    float* values, const float* added, uint32_t place, bool inverse) {
  using Floats = typename Vectors<Set>::Floats;
  using Words = typename Vectors<Set>::Words;
  constexpr int kCount = kBlock / Set::kFloats;
  constexpr auto kLanes = static_cast<uint32_t>(Set::kFloats);
  const float factor = codecs::rotation_factor<float>(kBlock);
  const auto change_sign = [&](Floats x, int i) COMMHOOKS_ALWAYS_INLINE {
    const Words signs = signs_from<Set>(place + static_cast<uint32_t>(i) * kLanes);
    return reinterpret_cast<Floats>(reinterpret_cast<Words>(x) ^ signs);
  };
  Floats x[kCount];
  for (int i = 0; i < kCount; ++i) {
    x[i] = load<Floats>(values + i * Set::kFloats);
    if (added != nullptr) {
      x[i] += load<Floats>(added + i * Set::kFloats);
    }
    if (!inverse) {
      x[i] = change_sign(x[i], i);
    }
    combine_all_lanes<Set>(x[i]);
  }
  for (int step = 1; step < kCount; step *= 2) {
    for (int i = 0; i < kCount; ++i) {
      if ((i & step) == 0) {
        const Floats sum = x[i] + x[i + step];
        x[i + step] = x[i] - x[i + step];
        x[i] = sum;
      }
    }
  }
  for (int i = 0; i < kCount; ++i) {
    x[i] *= factor;
    store(values + i * Set::kFloats, inverse ? change_sign(x[i], i) : x[i]);
  }
}

// Rotates `size` numbers, a power of two.
template <typename T>
COMMHOOKS_INLINE void rotate_numbers(
    T* values, const T* added, uint32_t place, int64_t size, bool inverse) {
  const auto change_signs = [&]() COMMHOOKS_ALWAYS_INLINE {
    for (int64_t i = 0; i < size; ++i) {
      const bool changes = codecs::rotation_sign(place + static_cast<uint32_t>(i)) != 0;
      values[i] = changes ? -values[i] : values[i];
    }
  };
  for (int64_t i = 0; added != nullptr && i < size; ++i) {
    values[i] += added[i];
  }
  if (!inverse) {
    change_signs();
  }
  for (int64_t h = 1; h < size; h *= 2) {
    for (int64_t i = 0; i < size; ++i) {
      if ((i & h) == 0) {
        const T sum = values[i] + values[i + h];
        values[i + h] = values[i] - values[i + h];
        values[i] = sum;
      }
    }
  }
  const T factor = codecs::rotation_factor<T>(static_cast<uint32_t>(size));
  for (int64_t i = 0; i < size; ++i) {
    values[i] *= factor;
  }
  if (inverse) {
    change_signs();
  }
}

template <typename Set, typename T>
COMMHOOKS_INLINE void rotate_blocks(
    const Parts& parts, T* values, const T* added, int64_t begin, int64_t end, bool inverse) {
  for (int64_t index = begin; index < end; ++index) {
    const Place place = place_of(parts, index);
    auto in_part = static_cast<uint32_t>(place.block * kBlock);
    T* numbers = values + place.first;
    const T* more = added == nullptr ? nullptr : added + place.first;
    if constexpr (std::is_same_v<T, float>) {
      if (place.count == kBlock) {
        rotate_block<Set>(numbers, more, in_part, inverse);
        continue;
      }
    }
    for (int64_t size = kBlock; size > 0; size /= 2) {
      if ((place.count & size) != 0) {
        rotate_numbers(numbers, more, in_part, size, inverse);
        numbers += size;
        more = more == nullptr ? nullptr : more + size;
        in_part += static_cast<uint32_t>(size);
      }
    }
  }
}

template <typename T>
void rotate_all(const Parts& parts, T* values, const T* added, bool inverse) {
  const int64_t count = (parts.numel + parts.part_length - 1) / parts.part_length;
  const int64_t blocks = count * parts.blocks_per_part;
  at::parallel_for(0, blocks, kGrain, [&](int64_t begin, int64_t end) {
    on_widest([&](auto set) COMMHOOKS_ALWAYS_INLINE {
      rotate_blocks<decltype(set)>(parts, values, added, begin, end, inverse);
    });
  });
}

}  // namespace

void rotate(
    const at::Tensor& values,
    const std::optional<at::Tensor>& added,
    int64_t part_length,
    bool inverse) {
  const Parts parts{values.numel(), part_length, kBlock};
  const void* more = added.has_value() ? added->const_data_ptr() : nullptr;
  if (values.scalar_type() == at::kDouble) {
    rotate_all(parts, values.data_ptr<double>(), static_cast<const double*>(more), inverse);
  } else {
    rotate_all(parts, values.data_ptr<float>(), static_cast<const float*>(more), inverse);
  }
}

}  // namespace commhooks
