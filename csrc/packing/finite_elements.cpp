#include "packing/finite_elements.h"

#include "shared/instruction_sets.h"

#include <c10/util/Exception.h>

#include <cstring>

namespace commhooks {
namespace {

// Infinities and NaN have an exponent with all bits set.
template <typename Bits>
bool exponents_below(Bits exponent, const void* numbers, int64_t numel) {
  const auto* bytes = static_cast<const char*>(numbers);
  return on_widest([=](auto) COMMHOOKS_ALWAYS_INLINE {
    Bits found = 0;
    for (int64_t i = 0; i < numel; ++i) {
      Bits bits;
      std::memcpy(&bits, bytes + i * sizeof(bits), sizeof(bits));
      found |= static_cast<Bits>((bits & exponent) == exponent);
    }
    return found == 0;
  });
}

}  // namespace

bool all_finite(const void* numbers, int64_t numel, c10::ScalarType type) {
  switch (type) {
    case c10::kDouble:
      return exponents_below<uint64_t>(0x7ff0000000000000u, numbers, numel);
    case c10::kFloat:
      return exponents_below<uint32_t>(0x7f800000u, numbers, numel);
    case c10::kHalf:
      return exponents_below<uint16_t>(0x7c00u, numbers, numel);
    case c10::kBFloat16:
      return exponents_below<uint16_t>(0x7f80u, numbers, numel);
    default:
      TORCH_CHECK(false, "Expected a floating type, found ", type, ".");
  }
}

}  // namespace commhooks
