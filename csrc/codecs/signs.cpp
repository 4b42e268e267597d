#include "kernels/codecs/sign.h"

#include "codecs/codec_loops.h"
#include "kernels/codecs/natural.h"

namespace commhooks {

std::optional<BlockLoops> sign_loops(const Format& format) {
  if (format.codes == "Natural") {
    return loops_of<codecs::Natural>();
  }
  if (format.codes != "Sign") {
    return std::nullopt;
  }
  const codecs::Sign codec{format.norm};
  return format.is_vote ? loops_of<codecs::Sign, Several::kMajority>(codec) : loops_of(codec);
}

}  // namespace commhooks
