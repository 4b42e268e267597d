#include "packing/half.h"

#include "shared/instruction_sets.h"

#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>

#ifdef COMMHOOKS_X86
#include <immintrin.h>
#endif

namespace commhooks {
namespace {

// Returns the bits of the bfloat16 nearest to `value`.
COMMHOOKS_INLINE uint16_t bfloat16_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded);
}

// One overload per instruction set.

void convert_to_half(Plain, const float* in, uint16_t* out, int64_t numel, float factor) {
  for (int64_t i = 0; i < numel; ++i) {
    out[i] = c10::Half(in[i] * factor).x;
  }
}

void convert_from_half(Plain, const uint16_t* in, float* out, int64_t numel, float factor) {
  for (int64_t i = 0; i < numel; ++i) {
    out[i] = static_cast<float>(c10::Half(in[i], c10::Half::from_bits())) * factor;
  }
}

#ifdef COMMHOOKS_X86
// Compilers do not vectorize conversions from and to half by themselves.
__attribute__((target("arch=x86-64-v4"))) void convert_to_half(
    Avx512, const float* in, uint16_t* out, int64_t numel, float factor) {
  const __m512 factors = _mm512_set1_ps(factor);
  int64_t i = 0;
  for (; i + 16 <= numel; i += 16) {
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(in + i), factors);
    const __m256i half = _mm512_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), half);
  }
  convert_to_half(Plain(), in + i, out + i, numel - i, factor);
}

__attribute__((target("arch=x86-64-v4"))) void convert_from_half(
    Avx512, const uint16_t* in, float* out, int64_t numel, float factor) {
  const __m512 factors = _mm512_set1_ps(factor);
  int64_t i = 0;
  for (; i + 16 <= numel; i += 16) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_cvtph_ps(half), factors));
  }
  convert_from_half(Plain(), in + i, out + i, numel - i, factor);
}

__attribute__((target("arch=x86-64-v3"))) void convert_to_half(
    Avx2, const float* in, uint16_t* out, int64_t numel, float factor) {
  const __m256 factors = _mm256_set1_ps(factor);
  int64_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(in + i), factors);
    const __m128i half = _mm256_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
  }
  convert_to_half(Plain(), in + i, out + i, numel - i, factor);
}

__attribute__((target("arch=x86-64-v3"))) void convert_from_half(
    Avx2, const uint16_t* in, float* out, int64_t numel, float factor) {
  const __m256 factors = _mm256_set1_ps(factor);
  int64_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_cvtph_ps(half), factors));
  }
  convert_from_half(Plain(), in + i, out + i, numel - i, factor);
}

// Splits [0, numel) so that the middle part consists of whole cache lines of `out`.
template <typename T>
struct CacheLines {
  static constexpr int64_t kPerLine = 64 / sizeof(T);
  CacheLines(const T* out, int64_t numel) {
    const auto misaligned = reinterpret_cast<uintptr_t>(out) % 64 / sizeof(T);
    begin = std::min<int64_t>(misaligned == 0 ? 0 : kPerLine - misaligned, numel);
    end = begin + (numel - begin) / kPerLine * kPerLine;
  }
  int64_t begin;
  int64_t end;
};

__attribute__((target("arch=x86-64-v4"))) void scale_streaming(
    Avx512, const float* in, float* out, int64_t numel, float factor) {
  const CacheLines<float> lines(out, numel);
  for (int64_t i = 0; i < lines.begin; ++i) {
    out[i] = in[i] * factor;
  }
  const __m512 factors = _mm512_set1_ps(factor);
  for (int64_t i = lines.begin; i < lines.end; i += 16) {
    _mm512_stream_ps(out + i, _mm512_mul_ps(_mm512_loadu_ps(in + i), factors));
  }
  _mm_sfence();
  for (int64_t i = lines.end; i < numel; ++i) {
    out[i] = in[i] * factor;
  }
}

__attribute__((target("arch=x86-64-v3"))) void scale_streaming(
    Avx2, const float* in, float* out, int64_t numel, float factor) {
  const CacheLines<float> lines(out, numel);
  for (int64_t i = 0; i < lines.begin; ++i) {
    out[i] = in[i] * factor;
  }
  const __m256 factors = _mm256_set1_ps(factor);
  for (int64_t i = lines.begin; i < lines.end; i += 8) {
    _mm256_stream_ps(out + i, _mm256_mul_ps(_mm256_loadu_ps(in + i), factors));
  }
  _mm_sfence();
  for (int64_t i = lines.end; i < numel; ++i) {
    out[i] = in[i] * factor;
  }
}

void stream_bytes_x86(const char* in, char* out, int64_t bytes) {
  const CacheLines<char> lines(out, bytes);
  std::memcpy(out, in, static_cast<size_t>(lines.begin));
  for (int64_t i = lines.begin; i < lines.end; i += 16) {
    const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm_stream_si128(reinterpret_cast<__m128i*>(out + i), value);
  }
  _mm_sfence();
  std::memcpy(out + lines.end, in + lines.end, static_cast<size_t>(bytes - lines.end));
}
#endif

void scale_streaming(Plain, const float* in, float* out, int64_t numel, float factor) {
  for (int64_t i = 0; i < numel; ++i) {
    out[i] = in[i] * factor;
  }
}

}  // namespace

void scale_float(const void* source, void* destination, int64_t numel, double scale) {
  on_widest([&](auto) COMMHOOKS_ALWAYS_INLINE {
    const auto* in = static_cast<const float*>(source);
    auto* out = static_cast<float*>(destination);
    const auto factor = static_cast<float>(scale);
    for (int64_t i = 0; i < numel; ++i) {
      out[i] = in[i] * factor;
    }
  });
}

void scale_float_streaming(const void* source, void* destination, int64_t numel, double scale) {
  on_widest([&](auto set) COMMHOOKS_ALWAYS_INLINE {
    scale_streaming(
        set, static_cast<const float*>(source), static_cast<float*>(destination), numel,
        static_cast<float>(scale));
  });
}

void stream_bytes(const void* source, void* destination, size_t bytes) {
  if (source == destination) {
    return;
  }
#ifdef COMMHOOKS_X86
  stream_bytes_x86(
      static_cast<const char*>(source), static_cast<char*>(destination),
      static_cast<int64_t>(bytes));
#else
  std::memcpy(destination, source, bytes);
#endif
}

void float_to_bfloat16(const void* source, void* destination, int64_t numel, double scale) {
  on_widest([&](auto) COMMHOOKS_ALWAYS_INLINE {
    const auto* __restrict in = static_cast<const float*>(source);
    auto* __restrict out = static_cast<uint16_t*>(destination);
    const auto factor = static_cast<float>(scale);
    for (int64_t i = 0; i < numel; ++i) {
      out[i] = bfloat16_bits(in[i] * factor);
    }
  });
}

void bfloat16_to_float(const void* source, void* destination, int64_t numel, double scale) {
  on_widest([&](auto) COMMHOOKS_ALWAYS_INLINE {
    const auto* __restrict in = static_cast<const uint16_t*>(source);
    auto* __restrict out = static_cast<float*>(destination);
    const auto factor = static_cast<float>(scale);
    for (int64_t i = 0; i < numel; ++i) {
      const uint32_t bits = static_cast<uint32_t>(in[i]) << 16;
      float value;
      std::memcpy(&value, &bits, sizeof(value));
      out[i] = value * factor;
    }
  });
}

void float_to_half(const void* source, void* destination, int64_t numel, double scale) {
  on_widest([&](auto set) COMMHOOKS_ALWAYS_INLINE {
    convert_to_half(
        set, static_cast<const float*>(source), static_cast<uint16_t*>(destination), numel,
        static_cast<float>(scale));
  });
}

void half_to_float(const void* source, void* destination, int64_t numel, double scale) {
  on_widest([&](auto set) COMMHOOKS_ALWAYS_INLINE {
    convert_from_half(
        set, static_cast<const uint16_t*>(source), static_cast<float*>(destination), numel,
        static_cast<float>(scale));
  });
}

}  // namespace commhooks
