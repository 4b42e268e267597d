// Packs the signs of numbers with instructions that compilers do not choose by themselves.
#pragma once

#include "codecs/blocks.h"

#ifdef COMMHOOKS_X86
#include <immintrin.h>
#endif

namespace commhooks {

// One overload per instruction set. Sets bit i of `packed` if y[i] * inverse is negative. Returns
// false if one of these is zero, or if there is no such instruction. `count` is a multiple of
// kFloats.

COMMHOOKS_INLINE bool pack_signs(
    Plain /*set*/, const float* /*y*/, float /*inverse*/, int64_t /*count*/, uint8_t* /*packed*/) {
  return false;
}

#ifdef COMMHOOKS_X86
__attribute__((target("arch=x86-64-v3"))) inline bool pack_signs(
    Avx2, const float* y, float inverse, int64_t count, uint8_t* packed) {
  __m256 zeros = _mm256_setzero_ps();
  for (int64_t i = 0; i < count; i += 8) {
    const __m256 ratios = _mm256_loadu_ps(y + i) * inverse;
    zeros = _mm256_or_ps(zeros, _mm256_cmp_ps(ratios, _mm256_setzero_ps(), _CMP_EQ_OQ));
    store(packed + i / 8, static_cast<uint8_t>(_mm256_movemask_ps(ratios)));
  }
  return _mm256_movemask_ps(zeros) == 0;
}

__attribute__((target("arch=x86-64-v4"))) inline bool pack_signs(
    Avx512, const float* y, float inverse, int64_t count, uint8_t* packed) {
  __mmask16 zeros = 0;
  for (int64_t i = 0; i < count; i += 16) {
    const __m512 ratios = _mm512_loadu_ps(y + i) * inverse;
    zeros |= _mm512_cmp_ps_mask(ratios, _mm512_setzero_ps(), _CMP_EQ_OQ);
    store(packed + i / 8, uint16_t{_mm512_movepi32_mask(_mm512_castps_si512(ratios))});
  }
  return zeros == 0;
}
#endif

}  // namespace commhooks
