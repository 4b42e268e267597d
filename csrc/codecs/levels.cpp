#include "codecs/codec_loops.h"

namespace commhooks {

std::optional<BlockLoops> level_loops(const Format& format) {
  COMMHOOKS_INTEGERS(COMMHOOKS_LOOPS_IF)
  return std::nullopt;
}

}  // namespace commhooks
