#include "codecs/fp8.h"

#include "cpu/block_codec.h"
#include "cpu/block_loops.h"

#include <c10/util/Exception.h>

namespace commhooks {
namespace {

COMMHOOKS_MULTIVERSIONED void encode_e4m3(const EncodeCall& call, int64_t begin, int64_t end) {
  encode_blocks(codecs::E4M3(), call, begin, end);
}

COMMHOOKS_MULTIVERSIONED void decode_e4m3(const DecodeCall& call, int64_t begin, int64_t end) {
  decode_blocks(codecs::E4M3(), call, begin, end);
}

COMMHOOKS_MULTIVERSIONED void encode_e5m2(const EncodeCall& call, int64_t begin, int64_t end) {
  encode_blocks(codecs::E5M2(), call, begin, end);
}

COMMHOOKS_MULTIVERSIONED void decode_e5m2(const DecodeCall& call, int64_t begin, int64_t end) {
  decode_blocks(codecs::E5M2(), call, begin, end);
}

class Fp8Loops final : public BlockLoops {
 public:
  explicit Fp8Loops(bool is_e4m3) : is_e4m3_(is_e4m3) {}
  int64_t bits() const override {
    return 8;
  }
  void encode(const EncodeCall& call, int64_t begin, int64_t end) const override {
    (is_e4m3_ ? encode_e4m3 : encode_e5m2)(call, begin, end);
  }
  void decode(const DecodeCall& call, int64_t begin, int64_t end) const override {
    (is_e4m3_ ? decode_e4m3 : decode_e5m2)(call, begin, end);
  }

 private:
  bool is_e4m3_;
};

}  // namespace

std::unique_ptr<BlockLoops> fp8_loops(const std::string& format) {
  TORCH_CHECK(
      format == "e4m3" || format == "e5m2", "Expected format to be 'e4m3' or 'e5m2', found '",
      format, "'.");
  return std::make_unique<Fp8Loops>(format == "e4m3");
}

}  // namespace commhooks
