#include "kernels/codecs/fp4.h"

#include "codecs/codec_loops.h"

#include <c10/util/Exception.h>

namespace commhooks {

std::unique_ptr<BlockLoops> fp4_loops(const std::string& format) {
  TORCH_CHECK(
      format == "mxfp4" || format == "nvfp4", "Expected format to be 'mxfp4' or 'nvfp4', found '",
      format, "'.");
  if (format == "mxfp4") {
    return std::make_unique<CodecLoops<codecs::Mxfp4>>();
  }
  return std::make_unique<CodecLoops<codecs::Nvfp4>>();
}

}  // namespace commhooks
