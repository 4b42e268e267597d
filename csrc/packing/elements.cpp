#include "packing/elements.h"

#include <algorithm>
#include <cstring>

#ifdef COMMHOOKS_X86
#include <immintrin.h>
#endif

namespace commhooks {
namespace {

// Conversions with half precision in them.
template <typename From, typename To, typename Via>
void convert(Plain, const From* in, To* out, int64_t numel, float factor) {
  for (int64_t i = 0; i < numel; ++i) {
    out[i] = static_cast<To>(static_cast<Via>(static_cast<float>(in[i]) * factor));
  }
}

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

// For Avx2 and Avx512: eight at a time are as fast as memory, also if registers are wider.
template <typename From, typename To, typename Via, typename Set>
COMMHOOKS_F16C void convert(Set, const From* in, To* out, int64_t numel, float factor) {
  const __m256 factors = _mm256_set1_ps(factor);
  int64_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    __m256 numbers = _mm256_mul_ps(load_8(in + i), factors);
    if constexpr (!std::is_same_v<Via, To>) {
      numbers = _mm256_cvtph_ps(to_half(numbers));
    }
    store_8(numbers, out + i);
  }
  convert<From, To, Via>(Plain(), in + i, out + i, numel - i, factor);
}

// Writes whole cache lines of `out` by `write_16_bytes(i)`, and other elements by `write(i)`.
template <typename T, typename Write16Bytes, typename Write>
void for_lines(const T* out, int64_t numel, Write16Bytes write_16_bytes, Write write) {
  constexpr int64_t per_line = 64 / sizeof(T);
  const auto misaligned = reinterpret_cast<uintptr_t>(out) % 64 / sizeof(T);
  const int64_t begin = std::min<int64_t>(misaligned == 0 ? 0 : per_line - misaligned, numel);
  const int64_t end = begin + (numel - begin) / per_line * per_line;
  write(0, begin);
  for (int64_t i = begin; i < end; i += per_line / 4) {
    write_16_bytes(i);
  }
  _mm_sfence();
  write(end, numel);
}
#endif

template <typename From, typename To, typename Via>
void convert_on_widest(const void* source, void* destination, int64_t numel, double scale) {
  on_widest([&](auto set) COMMHOOKS_ALWAYS_INLINE {
    convert<From, To, Via>(
        set, static_cast<const From*>(source), static_cast<To*>(destination), numel,
        static_cast<float>(scale));
  });
}

}  // namespace

template <>
void convert_elements<float, c10::Half>(
    const void* source, void* destination, int64_t numel, double scale) {
  convert_on_widest<float, c10::Half, c10::Half>(source, destination, numel, scale);
}

template <>
void convert_elements<c10::Half, float>(
    const void* source, void* destination, int64_t numel, double scale) {
  convert_on_widest<c10::Half, float, float>(source, destination, numel, scale);
}

template <>
void convert_elements<float, float, c10::Half>(
    const void* source, void* destination, int64_t numel, double scale) {
  convert_on_widest<float, float, c10::Half>(source, destination, numel, scale);
}

void scale_streaming(const void* source, void* destination, int64_t numel, double scale) {
#ifdef COMMHOOKS_X86
  const auto* const in = static_cast<const float*>(source);
  auto* const out = static_cast<float*>(destination);
  const __m128 factors = _mm_set1_ps(static_cast<float>(scale));
  for_lines(
      out, numel,
      [=](int64_t i) { _mm_stream_ps(out + i, _mm_mul_ps(_mm_loadu_ps(in + i), factors)); },
      [=](int64_t i, int64_t end) {
        convert_elements<float, float>(in + i, out + i, end - i, scale);
      });
#else
  convert_elements<float, float>(source, destination, numel, scale);
#endif
}

void stream_bytes(const void* source, void* destination, size_t bytes) {
#ifdef COMMHOOKS_X86
  const auto* const in = static_cast<const char*>(source);
  auto* const out = static_cast<char*>(destination);
  for_lines(
      out, static_cast<int64_t>(bytes),
      [=](int64_t i) {
        const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
        _mm_stream_si128(reinterpret_cast<__m128i*>(out + i), value);
      },
      [=](int64_t i, int64_t end) { std::memcpy(out + i, in + i, static_cast<size_t>(end - i)); });
#else
  std::memcpy(destination, source, bytes);
#endif
}

}  // namespace commhooks
