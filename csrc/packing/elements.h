// Conversions of consecutive numbers, with the widest instructions of the CPU.
#pragma once

#include "shared/instruction_sets.h"

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#ifdef COMMHOOKS_X86
#include <immintrin.h>
#endif

namespace commhooks {

#ifdef COMMHOOKS_X86
#define COMMHOOKS_F16C __attribute__((target("arch=x86-64-v3")))

COMMHOOKS_F16C inline __m256 load_8(const float* in) {
  return _mm256_loadu_ps(in);
}
COMMHOOKS_F16C inline __m256 load_8(const c10::Half* in) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}
COMMHOOKS_F16C inline void store_8(__m256 numbers, float* out) {
  _mm256_storeu_ps(out, numbers);
}
COMMHOOKS_F16C inline __m128i to_half(__m256 numbers) {
  return _mm256_cvtps_ph(numbers, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
COMMHOOKS_F16C inline void store_8(__m256 numbers, c10::Half* out) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), to_half(numbers));
}

// As `convert_elements`, with instructions that compilers do not choose by themselves, for
// multiples of eight; returns how many it has converted. Eight at a time are as fast as memory,
// also if registers are wider.
template <typename From, typename To, typename Via>
COMMHOOKS_F16C int64_t convert_eights(const From* in, To* out, int64_t numel, float factor) {
  const __m256 factors = _mm256_set1_ps(factor);
  int64_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    __m256 numbers = _mm256_mul_ps(load_8(in + i), factors);
    if constexpr (!std::is_same_v<Via, To>) {
      numbers = _mm256_cvtph_ps(to_half(numbers));
    }
    store_8(numbers, out + i);
  }
  return i;
}
#endif

// Whether numbers are in half precision on the way, and in fp32 otherwise.
template <typename... Types>
inline constexpr bool kThroughHalf = (std::is_same_v<Types, c10::Half> || ...) &&
    ((std::is_same_v<Types, float> || std::is_same_v<Types, c10::Half>) && ...);

// destination[i] = cast(scale * source[i]) for `numel` elements, which are cast to `Via` first.
// Multiplies in fp64 if one of the types is fp64, otherwise in fp32; rounds to nearest even. Source
// and destination may be the same memory, but must not overlap otherwise.
template <typename From, typename To, typename Via = To>
void convert_elements(const void* source, void* destination, int64_t numel, double scale) {
  using Math =
      std::conditional_t<std::is_same_v<From, double> || std::is_same_v<To, double>, double, float>;
  on_widest([&]([[maybe_unused]] auto set) COMMHOOKS_ALWAYS_INLINE {
    const auto* const in = static_cast<const From*>(source);
    auto* const out = static_cast<To*>(destination);
    const auto factor = static_cast<Math>(scale);
    int64_t i = 0;
#ifdef COMMHOOKS_X86
    if constexpr (kThroughHalf<From, To, Via> && !std::is_same_v<decltype(set), Plain>) {
      i = convert_eights<From, To, Via>(in, out, numel, factor);
    }
#endif
#pragma GCC ivdep
    for (; i < numel; ++i) {
      out[i] = static_cast<To>(static_cast<Via>(static_cast<Math>(in[i]) * factor));
    }
  });
}

// As `convert_elements<float, float>`, without loading the destination into the caches.
void scale_streaming(const void* source, void* destination, int64_t numel, double scale);

// Copies without loading the destination into the caches.
void stream_bytes(const void* source, void* destination, size_t bytes);

// Calls `body.template operator()<T>()` with the C++ type of floating numbers.
template <typename Body>
auto with_type(c10::ScalarType type, const Body& body) {
  switch (type) {
    case c10::kDouble:
      return body.template operator()<double>();
    case c10::kFloat:
      return body.template operator()<float>();
    case c10::kHalf:
      return body.template operator()<c10::Half>();
    case c10::kBFloat16:
      return body.template operator()<c10::BFloat16>();
    default:
      TORCH_CHECK(false, "Expected gradients in fp64, fp32, fp16 or bf16, found ", type, ".");
  }
}

}  // namespace commhooks
