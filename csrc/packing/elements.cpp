#include "packing/elements.h"

#include <algorithm>
#include <cstring>

#ifdef COMMHOOKS_X86
#include <immintrin.h>
#endif

namespace commhooks {
namespace {

void to_half(Plain, const float* in, uint16_t* out, int64_t numel, float factor) {
  for (int64_t i = 0; i < numel; ++i) {
    out[i] = c10::Half(in[i] * factor).x;
  }
}

void from_half(Plain, const uint16_t* in, float* out, int64_t numel, float factor) {
  for (int64_t i = 0; i < numel; ++i) {
    out[i] = static_cast<float>(c10::Half(in[i], c10::Half::from_bits())) * factor;
  }
}

void round_to_half(Plain, const float* in, float* out, int64_t numel, float factor) {
  for (int64_t i = 0; i < numel; ++i) {
    out[i] = static_cast<float>(c10::Half(in[i] * factor));
  }
}

#ifdef COMMHOOKS_X86
// For Avx2 and Avx512: eight at a time are as fast as memory, also if registers are wider.
template <typename Set>
__attribute__((target("arch=x86-64-v3"))) void to_half(
    Set, const float* in, uint16_t* out, int64_t numel, float factor) {
  const __m256 factors = _mm256_set1_ps(factor);
  int64_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(in + i), factors);
    const __m128i half = _mm256_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
  }
  to_half(Plain(), in + i, out + i, numel - i, factor);
}

template <typename Set>
__attribute__((target("arch=x86-64-v3"))) void from_half(
    Set, const uint16_t* in, float* out, int64_t numel, float factor) {
  const __m256 factors = _mm256_set1_ps(factor);
  int64_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_cvtph_ps(half), factors));
  }
  from_half(Plain(), in + i, out + i, numel - i, factor);
}

template <typename Set>
__attribute__((target("arch=x86-64-v3"))) void round_to_half(
    Set, const float* in, float* out, int64_t numel, float factor) {
  const __m256 factors = _mm256_set1_ps(factor);
  int64_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(in + i), factors);
    const __m128i half = _mm256_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half));
  }
  round_to_half(Plain(), in + i, out + i, numel - i, factor);
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

}  // namespace

template <>
void convert_elements<float, c10::Half>(
    const void* source, void* destination, int64_t numel, double scale) {
  on_widest([&](auto set) COMMHOOKS_ALWAYS_INLINE {
    to_half(
        set, static_cast<const float*>(source), static_cast<uint16_t*>(destination), numel,
        static_cast<float>(scale));
  });
}

template <>
void convert_elements<c10::Half, float>(
    const void* source, void* destination, int64_t numel, double scale) {
  on_widest([&](auto set) COMMHOOKS_ALWAYS_INLINE {
    from_half(
        set, static_cast<const uint16_t*>(source), static_cast<float*>(destination), numel,
        static_cast<float>(scale));
  });
}

template <>
void convert_elements<float, float, c10::Half>(
    const void* source, void* destination, int64_t numel, double scale) {
  on_widest([&](auto set) COMMHOOKS_ALWAYS_INLINE {
    round_to_half(
        set, static_cast<const float*>(source), static_cast<float*>(destination), numel,
        static_cast<float>(scale));
  });
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
