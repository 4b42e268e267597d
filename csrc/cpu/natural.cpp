#include "codecs/natural.h"

#include "cpu/block_codec.h"
#include "cpu/block_loops.h"

namespace commhooks {
namespace {

COMMHOOKS_MULTIVERSIONED void encode_natural(const EncodeCall& call, int64_t begin, int64_t end) {
  encode_blocks(codecs::Natural(), call, begin, end);
}

COMMHOOKS_MULTIVERSIONED void decode_natural(const DecodeCall& call, int64_t begin, int64_t end) {
  decode_blocks(codecs::Natural(), call, begin, end);
}

class NaturalLoops final : public BlockLoops {
 public:
  int64_t bits() const override {
    return 8;
  }
  void encode(const EncodeCall& call, int64_t begin, int64_t end) const override {
    encode_natural(call, begin, end);
  }
  void decode(const DecodeCall& call, int64_t begin, int64_t end) const override {
    decode_natural(call, begin, end);
  }
};

}  // namespace

std::unique_ptr<BlockLoops> natural_loops() {
  return std::make_unique<NaturalLoops>();
}

}  // namespace commhooks
