// Floating types in kernels: the types that they are multiplied in, and the casts.
#pragma once

#include "packing/cuda/convert.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace commhooks::cuda {

// The type in which elements are multiplied.
template <typename From, typename To = From>
using Math =
    std::conditional_t<std::is_same_v<From, double> || std::is_same_v<To, double>, double, float>;

// Conversions between an element and the type in which it is multiplied, by name: torch compiles
// extensions without the implicit conversions of __half and __nv_bfloat16.
__device__ inline double to_math(double value) {
  return value;
}
__device__ inline float to_math(float value) {
  return value;
}
__device__ inline float to_math(__half value) {
  return __half2float(value);
}
__device__ inline float to_math(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

template <typename To>
__device__ To from_math(Math<To> value) {
  if constexpr (std::is_same_v<To, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<To, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

// To and from half precision through fp32, as torch casts, rounded to nearest even.
template <typename To, typename From>
__device__ To convert_element(From value, Math<From, To> scale) {
  const Math<From, To> product = to_math(value) * scale;
  return from_math<To>(static_cast<Math<To>>(product));
}

template <typename T>
__device__ bool is_finite(T value) {
  return isfinite(to_math(value));
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
