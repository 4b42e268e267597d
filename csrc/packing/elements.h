// Conversions of consecutive numbers, with the widest instructions of the CPU.
#pragma once

#include "shared/instruction_sets.h"

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace commhooks {

// destination[i] = cast(scale * source[i]) for `numel` elements, which are cast to `Via` first.
// Multiplies in fp64 if one of the types is fp64, otherwise in fp32; rounds to nearest even. Source
// and destination may be the same memory, but must not overlap otherwise.
template <typename From, typename To, typename Via = To>
void convert_elements(const void* source, void* destination, int64_t numel, double scale) {
  using Math =
      std::conditional_t<std::is_same_v<From, double> || std::is_same_v<To, double>, double, float>;
  on_widest([&](auto) COMMHOOKS_ALWAYS_INLINE {
    const auto* const in = static_cast<const From*>(source);
    auto* const out = static_cast<To*>(destination);
    const auto factor = static_cast<Math>(scale);
#pragma GCC ivdep
    for (int64_t i = 0; i < numel; ++i) {
      out[i] = static_cast<To>(static_cast<Via>(static_cast<Math>(in[i]) * factor));
    }
  });
}

// With instructions that compilers do not choose by themselves; in other memory.
template <>
void convert_elements<float, c10::Half>(const void*, void*, int64_t numel, double scale);
template <>
void convert_elements<c10::Half, float>(const void*, void*, int64_t numel, double scale);
template <>
void convert_elements<float, float, c10::Half>(const void*, void*, int64_t numel, double scale);

// As `convert_elements<float, float>`, without loading the destination into the caches.
void scale_streaming(const void* source, void* destination, int64_t numel, double scale);

// Copies without loading the destination into the caches.
void stream_bytes(const void* source, void* destination, size_t bytes);

// Calls `body.template operator()<T>()` with the C++ type of floating numbers.
template <typename Body>
auto with_type(c10::ScalarType type, const Body& body) {
  switch (type) {
    case c10::kDouble:
      return body.template operator()<double>();
    case c10::kFloat:
      return body.template operator()<float>();
    case c10::kHalf:
      return body.template operator()<c10::Half>();
    case c10::kBFloat16:
      return body.template operator()<c10::BFloat16>();
    default:
      TORCH_CHECK(false, "Expected gradients in fp64, fp32, fp16 or bf16, found ", type, ".");
  }
}

}  // namespace commhooks
