#include "codecs/sign.h"

#include "cpu/block_codec.h"
#include "cpu/block_loops.h"

#include <c10/util/Exception.h>

namespace commhooks {
namespace {

using codecs::Norm;
using codecs::Sign;

COMMHOOKS_MULTIVERSIONED void encode_signs(
    const Sign& codec, const EncodeCall& call, int64_t begin, int64_t end) {
  encode_blocks(codec, call, begin, end);
}

COMMHOOKS_MULTIVERSIONED void average_signs(
    const Sign& codec, const DecodeCall& call, int64_t begin, int64_t end) {
  decode_blocks(codec, call, begin, end);
}

COMMHOOKS_MULTIVERSIONED void vote_on_signs(
    const Sign& codec, const DecodeCall& call, int64_t begin, int64_t end) {
  decode_blocks<Sign, Several::kMajority>(codec, call, begin, end);
}

class SignLoops final : public BlockLoops {
 public:
  SignLoops(Norm norm, bool majority) : codec_{norm}, majority_(majority) {}
  int64_t bits() const override {
    return 1;
  }
  void encode(const EncodeCall& call, int64_t begin, int64_t end) const override {
    encode_signs(codec_, call, begin, end);
  }
  void decode(const DecodeCall& call, int64_t begin, int64_t end) const override {
    (majority_ ? vote_on_signs : average_signs)(codec_, call, begin, end);
  }

 private:
  Sign codec_;
  bool majority_;
};

}  // namespace

std::unique_ptr<BlockLoops> sign_loops(const std::string& norm, bool majority) {
  TORCH_CHECK(
      norm == "mean" || norm == "root_mean", "Expected norm to be 'mean' or 'root_mean', found '",
      norm, "'.");
  return std::make_unique<SignLoops>(norm == "mean" ? Norm::kMean : Norm::kRootMean, majority);
}

}  // namespace commhooks
