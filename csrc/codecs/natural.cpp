#include "kernels/codecs/natural.h"

#include "codecs/codec_loops.h"

namespace commhooks {

std::unique_ptr<BlockLoops> natural_loops() {
  return std::make_unique<CodecLoops<codecs::Natural>>();
}

}  // namespace commhooks
