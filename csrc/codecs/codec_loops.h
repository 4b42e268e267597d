// The loops over blocks for one format, compiled for all instruction sets.
#pragma once

#include "codecs/decode_blocks.h"
#include "codecs/encode_blocks.h"
#include "kernels/codecs/formats.h"

#include <c10/util/Exception.h>

namespace commhooks {

template <Combine combine, typename Codec>
BlockLoops loops_for(const Codec& codec) {
  return {
      [codec](const EncodeCall& call, int64_t begin, int64_t end) {
        on_widest([&](auto set) COMMHOOKS_ALWAYS_INLINE {
          if (call.is_double) {
            encode_blocks<decltype(set), double>(codec, call, begin, end);
          } else {
            encode_blocks<decltype(set), float>(codec, call, begin, end);
          }
        });
      },
      [codec](const DecodeCall& call, int64_t begin, int64_t end) {
        on_widest([&](auto set) COMMHOOKS_ALWAYS_INLINE {
          if (call.is_double) {
            decode_blocks<decltype(set), double, combine>(codec, call, begin, end);
          } else {
            decode_blocks<decltype(set), float, combine>(codec, call, begin, end);
          }
        });
      }};
}

template <typename Codec>
BlockLoops loops_of(const Format& format) {
  TORCH_CHECK(
      format.bits == Codec::kBits && format.group == Codec::kGroup, "Expected ", Codec::kBits,
      " bits and groups of ", Codec::kGroup, " for the codes ", format.codes, ", found ",
      format.bits, " and ", format.group, ".");
  Codec codec{};
  codecs::configure(codec, {format.norm, format.levels, format.clip});
  if constexpr (std::is_same_v<Codec, codecs::Sign>) {
    if (format.is_vote) {
      return loops_for<Combine::kVote>(codec);
    }
  }
  return loops_for<Combine::kMean>(codec);
}

}  // namespace commhooks

// A row of a list of formats.
#define COMMHOOKS_LOOPS_IF(...)           \
  if (format.codes == #__VA_ARGS__) {     \
    using namespace codecs;               \
    return loops_of<__VA_ARGS__>(format); \
  }
