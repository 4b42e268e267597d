#include "packing/elements.h"

#include <algorithm>
#include <cstring>

namespace commhooks {
namespace {

#ifdef COMMHOOKS_X86
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
