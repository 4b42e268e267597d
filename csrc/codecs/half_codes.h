// Decodes fp8 through half precision, with an instruction that compilers do not choose by
// themselves.
#pragma once

#include "codecs/blocks.h"
#include "kernels/codecs/formats.h"

#include <type_traits>

#ifdef COMMHOOKS_X86
#include <immintrin.h>
#endif

namespace commhooks {

// Returns whether the codes of a tile give the same numbers as halves. Codes of infinity and NaN do
// not: encoders do not produce them, and the other loops decode them as numbers. With e4m3 all
// codes do.
COMMHOOKS_INLINE bool are_halves(codecs::E4M3 /*codec*/, const uint8_t* /*codes*/) {
  return true;
}

COMMHOOKS_INLINE bool are_halves(codecs::E5M2 /*codec*/, const uint8_t* codes) {
  uint8_t above = 0;
  for (int64_t i = 0; i < kTile; ++i) {
    above |= static_cast<uint8_t>((codes[i] & 0x7f) + 4);  // bit 7 is set for the largest exponent
  }
  return above < 0x80;
}

#ifdef COMMHOOKS_X86
// The numbers of kFloats codes; one overload per instruction set. A half has as many exponent bits
// as e5m2. It has one more than e4m3, so its number is 2^8 times smaller, also if it is subnormal.

template <typename Codec>
__attribute__((target("arch=x86-64-v3"))) inline __m256 widened(
    Avx2 /*set*/, Codec /*codec*/, const uint8_t* codes) {
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  const __m128i upper_bytes = _mm_unpacklo_epi8(_mm_setzero_si128(), eight);
  if constexpr (std::is_same_v<Codec, codecs::E5M2>) {
    return _mm256_cvtph_ps(upper_bytes);
  }
  const __m128i signs_twice = _mm_srai_epi16(upper_bytes, 1);
  return _mm256_cvtph_ps(_mm_andnot_si128(_mm_set1_epi16(0x4000), signs_twice)) * 256.0f;
}

template <typename Codec>
__attribute__((target("arch=x86-64-v4"))) inline __m512 widened(
    Avx512 /*set*/, Codec /*codec*/, const uint8_t* codes) {
  const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m256i upper_bytes = _mm256_slli_epi16(_mm256_cvtepu8_epi16(sixteen), 8);
  if constexpr (std::is_same_v<Codec, codecs::E5M2>) {
    return _mm512_cvtph_ps(upper_bytes);
  }
  const __m256i signs_twice = _mm256_srai_epi16(upper_bytes, 1);
  return _mm512_cvtph_ps(_mm256_andnot_si256(_mm256_set1_epi16(0x4000), signs_twice)) * 256.0f;
}
#endif

}  // namespace commhooks
