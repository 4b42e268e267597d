#include "codecs/codec_loops.h"

namespace commhooks {

std::optional<BlockLoops> sign_loops(const Format& format) {
  COMMHOOKS_SIGNS(COMMHOOKS_LOOPS_IF)
  return std::nullopt;
}

}  // namespace commhooks
