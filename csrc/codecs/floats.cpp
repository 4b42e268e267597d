#include "codecs/codec_loops.h"
#include "kernels/codecs/fp4.h"
#include "kernels/codecs/fp8.h"

namespace commhooks {
namespace {

template <typename Codec>
std::unique_ptr<BlockLoops> loops() {
  return std::make_unique<CodecLoops<Codec>>();
}

}  // namespace

std::unique_ptr<BlockLoops> float_loops(const Format& format) {
  const std::string& codes = format.codes;
  return codes == "E4M3" ? loops<codecs::E4M3>()
      : codes == "E5M2"  ? loops<codecs::E5M2>()
      : codes == "E3M0"  ? loops<codecs::E3M0>()
      : codes == "Mxfp4" ? loops<codecs::Mxfp4>()
      : codes == "Nvfp4" ? loops<codecs::Nvfp4>()
                         : nullptr;
}

}  // namespace commhooks
