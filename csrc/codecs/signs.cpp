#include "kernels/codecs/sign.h"

#include "codecs/codec_loops.h"
#include "kernels/codecs/natural.h"

namespace commhooks {

std::unique_ptr<BlockLoops> sign_loops(const Format& format) {
  if (format.codes == "Natural") {
    return std::make_unique<CodecLoops<codecs::Natural>>();
  }
  if (format.codes != "Sign") {
    return nullptr;
  }
  const codecs::Sign codec{format.norm};
  if (format.is_vote) {
    return std::make_unique<CodecLoops<codecs::Sign, Several::kMajority>>(codec);
  }
  return std::make_unique<CodecLoops<codecs::Sign>>(codec);
}

}  // namespace commhooks
