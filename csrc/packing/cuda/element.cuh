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

// To and from half precision through fp32, as torch casts, rounded to nearest even.
template <typename To, typename From>
__device__ To convert_element(From value, Math<From, To> scale) {
  const Math<From, To> product = static_cast<Math<From>>(value) * scale;
  return static_cast<To>(static_cast<Math<To>>(product));
}

template <typename T>
__device__ bool is_finite(T value) {
  return isfinite(static_cast<Math<T>>(value));
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
