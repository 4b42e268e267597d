#include "kernels/codecs/fp8.h"

#include "codecs/codec_loops.h"

#include <c10/util/Exception.h>

namespace commhooks {

std::unique_ptr<BlockLoops> fp8_loops(const std::string& format) {
  TORCH_CHECK(
      format == "e4m3" || format == "e5m2", "Expected format to be 'e4m3' or 'e5m2', found '",
      format, "'.");
  if (format == "e4m3") {
    return std::make_unique<CodecLoops<codecs::E4M3>>();
  }
  return std::make_unique<CodecLoops<codecs::E5M2>>();
}

}  // namespace commhooks
