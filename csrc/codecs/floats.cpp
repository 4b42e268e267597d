#include "codecs/codec_loops.h"

namespace commhooks {

std::optional<BlockLoops> float_loops(const Format& format) {
  COMMHOOKS_FLOATS(COMMHOOKS_LOOPS_IF)
  return std::nullopt;
}

}  // namespace commhooks
