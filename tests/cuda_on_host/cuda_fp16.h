// fp16 on the host, by torch's arithmetic.
#pragma once

#include <c10/util/Half.h>

using __half = c10::Half;

inline float __half2float(__half value) {
  return static_cast<float>(value);
}

inline __half __float2half_rn(float value) {
  return __half(value);
}
