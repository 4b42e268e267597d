// The loops over blocks for one codec, compiled for all instruction sets.
#pragma once

#include "codecs/decode_blocks.h"
#include "codecs/encode_blocks.h"

namespace commhooks {

template <typename Codec, Several several = Several::kMean>
BlockLoops loops_of(const Codec& codec = {}) {
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
            decode_blocks<decltype(set), double, several>(codec, call, begin, end);
          } else {
            decode_blocks<decltype(set), float, several>(codec, call, begin, end);
          }
        });
      }};
}

}  // namespace commhooks
