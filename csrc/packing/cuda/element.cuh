// Floating types in kernels: the types that they are multiplied in, and the casts.
#pragma once

#include "packing/cuda/convert.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace commhooks::cuda {

__device__ inline double widen(double value) {
  return value;
}
__device__ inline float widen(float value) {
  return value;
}
__device__ inline float widen(__half value) {
  return __half2float(value);
}
__device__ inline float widen(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

__device__ inline void narrow(double value, double* to) {
  *to = value;
}
__device__ inline void narrow(double value, float* to) {
  *to = static_cast<float>(value);
}
// Through fp32, as torch casts.
__device__ inline void narrow(double value, __half* to) {
  *to = __float2half_rn(static_cast<float>(value));
}
__device__ inline void narrow(double value, __nv_bfloat16* to) {
  *to = __float2bfloat16_rn(static_cast<float>(value));
}
__device__ inline void narrow(float value, double* to) {
  *to = value;
}
__device__ inline void narrow(float value, float* to) {
  *to = value;
}
__device__ inline void narrow(float value, __half* to) {
  *to = __float2half_rn(value);
}
__device__ inline void narrow(float value, __nv_bfloat16* to) {
  *to = __float2bfloat16_rn(value);
}

// The type in which elements are multiplied.
template <typename From, typename To>
using Math =
    std::conditional_t<std::is_same_v<From, double> || std::is_same_v<To, double>, double, float>;

template <typename To, typename From>
__device__ To convert_element(From value, Math<From, To> scale) {
  To converted;
  narrow(static_cast<Math<From, To>>(widen(value)) * scale, &converted);
  return converted;
}

template <typename T>
__device__ bool is_finite(T value) {
  return isfinite(widen(value));
}

// Calls `body` with a number of the type of `element`.
template <typename Body>
auto with_element(Element element, const Body& body) {
  switch (element) {
    case Element::fp64:
      return body(double());
    case Element::fp32:
      return body(float());
    case Element::fp16:
      return body(__half());
    default:
      return body(__nv_bfloat16());
  }
}

}  // namespace commhooks::cuda
