#include "codecs/codec_loops.h"
#include "kernels/codecs/fp4.h"

namespace commhooks {

std::optional<BlockLoops> float_loops(const Format& format) {
  const std::string& codes = format.codes;
  return codes == "E4M3" ? std::optional(loops_of<codecs::E4M3>())
      : codes == "E5M2"  ? std::optional(loops_of<codecs::E5M2>())
      : codes == "E3M0"  ? std::optional(loops_of<codecs::E3M0>())
      : codes == "Mxfp4" ? std::optional(loops_of<codecs::Mxfp4>())
      : codes == "Nvfp4" ? std::optional(loops_of<codecs::Nvfp4>())
                         : std::nullopt;
}

}  // namespace commhooks
