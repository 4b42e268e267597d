// The loops over blocks for one codec, compiled for all instruction sets.
#pragma once

#include "codecs/decode_blocks.h"
#include "codecs/encode_blocks.h"

namespace commhooks {

template <typename Codec, Several several = Several::kMean>
class CodecLoops final : public BlockLoops {
 public:
  explicit CodecLoops(const Codec& codec = {}) : codec_(codec) {}

  void encode(const EncodeCall& call, int64_t begin, int64_t end) const override {
    on_widest([&](auto set) COMMHOOKS_ALWAYS_INLINE {
      if (call.is_double) {
        encode_blocks<decltype(set), double>(codec_, call, begin, end);
      } else {
        encode_blocks<decltype(set), float>(codec_, call, begin, end);
      }
    });
  }

  void decode(const DecodeCall& call, int64_t begin, int64_t end) const override {
    on_widest([&](auto set) COMMHOOKS_ALWAYS_INLINE {
      if (call.is_double) {
        decode_blocks<decltype(set), double, several>(codec_, call, begin, end);
      } else {
        decode_blocks<decltype(set), float, several>(codec_, call, begin, end);
      }
    });
  }

 private:
  Codec codec_;
};

}  // namespace commhooks
