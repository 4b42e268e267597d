#include "kernels/codecs/sign.h"

#include "codecs/codec_loops.h"

#include <c10/util/Exception.h>

namespace commhooks {

std::unique_ptr<BlockLoops> sign_loops(const std::string& norm, bool majority) {
  TORCH_CHECK(
      norm == "mean" || norm == "root_mean", "Expected norm to be 'mean' or 'root_mean', found '",
      norm, "'.");
  const codecs::Sign codec{norm == "mean" ? codecs::Norm::kMean : codecs::Norm::kRootMean};
  if (majority) {
    return std::make_unique<CodecLoops<codecs::Sign, Several::kMajority>>(codec);
  }
  return std::make_unique<CodecLoops<codecs::Sign>>(codec);
}

}  // namespace commhooks
