#include "kernels/codecs/levels.h"

#include "codecs/codec_loops.h"

#include <c10/util/Exception.h>

#include <cmath>

namespace commhooks {
namespace {

template <bool stochastic>
std::unique_ptr<BlockLoops> loops_of_width(
    int64_t bits, codecs::Norm norm, float levels, float clip) {
  const auto loops = [&]<int width>() -> std::unique_ptr<BlockLoops> {
    using Codec = codecs::Levels<width, stochastic>;
    return std::make_unique<CodecLoops<Codec>>(Codec{norm, levels, clip});
  };
  switch (bits) {
    case 2:
      return loops.template operator()<2>();
    case 4:
      return loops.template operator()<4>();
    default:
      return loops.template operator()<8>();
  }
}

codecs::Norm norm_of(const std::string& norm, double clip) {
  TORCH_CHECK(
      norm == "max" || norm == "signed_max" || norm == "l2",
      "Expected norm to be 'max', 'signed_max' or 'l2', found '", norm, "'.");
  if (norm == "max") {
    return std::isfinite(clip) ? codecs::Norm::kRootMean : codecs::Norm::kLargest;
  }
  return norm == "l2" ? codecs::Norm::kEuclidean : codecs::Norm::kSigned;
}

}  // namespace

std::unique_ptr<BlockLoops> level_loops(
    int64_t bits, int64_t levels, const std::string& norm, double clip, bool stochastic) {
  TORCH_CHECK(
      bits == 2 || bits == 4 || bits == 8, "Expected codes of 2, 4 or 8 bits, found ", bits, ".");
  const int64_t most = (int64_t{1} << (bits - 1)) - 1;
  TORCH_CHECK(
      levels >= 1 && levels <= most, "Expected 1 to ", most, " levels in ", bits, " bits, found ",
      levels, ".");
  TORCH_CHECK(clip > 0, "Expected clip to be above 0, found ", clip, ".");
  return (stochastic ? loops_of_width<true> : loops_of_width<false>)(bits, norm_of(norm, clip),
                                                                     static_cast<float>(levels),
                                                                     static_cast<float>(clip));
}

}  // namespace commhooks
