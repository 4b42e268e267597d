#include "kernels/codecs/fp4.h"

#include "codecs/codec_loops.h"

#include <c10/util/Exception.h>

namespace commhooks {

std::unique_ptr<BlockLoops> fp4_loops(const std::string& format) {
  TORCH_CHECK(
      format == "mxfp4" || format == "nvfp4" || format == "e3m0",
      "Expected format to be 'mxfp4', 'nvfp4' or 'e3m0', found '", format, "'.");
  if (format == "mxfp4") {
    return std::make_unique<CodecLoops<codecs::Mxfp4>>();
  }
  if (format == "e3m0") {
    return std::make_unique<CodecLoops<codecs::E3M0>>();
  }
  return std::make_unique<CodecLoops<codecs::Nvfp4>>();
}

}  // namespace commhooks
