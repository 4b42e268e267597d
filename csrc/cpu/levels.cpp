#include "codecs/levels.h"

#include "cpu/block_codec.h"
#include "cpu/block_loops.h"

#include <c10/util/Exception.h>

#include <cmath>

namespace commhooks {
namespace {

using codecs::Levels;
using codecs::Norm;

// The members are the same for every width.
struct Options {
  int64_t bits;
  Norm norm;
  float levels;
  float clip;
  bool stochastic;

  template <int bits, bool stochastic>
  COMMHOOKS_INLINE Levels<bits, stochastic> codec() const {
    return {norm, levels, clip};
  }
};

template <int bits>
COMMHOOKS_INLINE void encode_width(
    const Options& options, const EncodeCall& call, int64_t begin, int64_t end) {
  if (options.stochastic) {
    encode_blocks(options.codec<bits, true>(), call, begin, end);
  } else {
    encode_blocks(options.codec<bits, false>(), call, begin, end);
  }
}

COMMHOOKS_MULTIVERSIONED void encode_levels(
    const Options& options, const EncodeCall& call, int64_t begin, int64_t end) {
  switch (options.bits) {
    case 2:
      return encode_width<2>(options, call, begin, end);
    case 4:
      return encode_width<4>(options, call, begin, end);
    default:
      return encode_width<8>(options, call, begin, end);
  }
}

COMMHOOKS_MULTIVERSIONED void decode_levels(
    const Options& options, const DecodeCall& call, int64_t begin, int64_t end) {
  switch (options.bits) {
    case 2:
      return decode_blocks(options.codec<2, false>(), call, begin, end);
    case 4:
      return decode_blocks(options.codec<4, false>(), call, begin, end);
    default:
      return decode_blocks(options.codec<8, false>(), call, begin, end);
  }
}

class LevelLoops final : public BlockLoops {
 public:
  explicit LevelLoops(const Options& options) : options_(options) {}
  int64_t bits() const override {
    return options_.bits;
  }
  void encode(const EncodeCall& call, int64_t begin, int64_t end) const override {
    encode_levels(options_, call, begin, end);
  }
  void decode(const DecodeCall& call, int64_t begin, int64_t end) const override {
    decode_levels(options_, call, begin, end);
  }

 private:
  Options options_;
};

}  // namespace

std::unique_ptr<BlockLoops> level_loops(
    int64_t bits, int64_t levels, const std::string& norm, double clip, bool stochastic) {
  TORCH_CHECK(
      bits == 2 || bits == 4 || bits == 8, "Expected codes of 2, 4 or 8 bits, found ", bits, ".");
  const int64_t most = (int64_t{1} << (bits - 1)) - 1;
  TORCH_CHECK(
      levels >= 1 && levels <= most, "Expected 1 to ", most, " levels in ", bits, " bits, found ",
      levels, ".");
  TORCH_CHECK(
      norm == "max" || norm == "l2", "Expected norm to be 'max' or 'l2', found '", norm, "'.");
  TORCH_CHECK(clip > 0, "Expected clip to be above 0, found ", clip, ".");
  const Norm unclipped = norm == "max" ? Norm::kLargest : Norm::kEuclidean;
  const bool is_clipped = norm == "max" && std::isfinite(clip);
  return std::make_unique<LevelLoops>(Options{
      bits, is_clipped ? Norm::kRootMean : unclipped, static_cast<float>(levels),
      static_cast<float>(clip), stochastic});
}

}  // namespace commhooks
