#include "kernels/codecs/levels.h"

#include "codecs/codec_loops.h"

namespace commhooks {
namespace {

template <int bits, bool stochastic>
std::optional<BlockLoops> loops(const Format& format) {
  return loops_of(codecs::Levels<bits, stochastic>{format.norm, format.levels, format.clip});
}

}  // namespace

std::optional<BlockLoops> level_loops(const Format& format) {
  const std::string& codes = format.codes;
  return codes == "Levels<2, false>" ? loops<2, false>(format)
      : codes == "Levels<2, true>"   ? loops<2, true>(format)
      : codes == "Levels<4, false>"  ? loops<4, false>(format)
      : codes == "Levels<4, true>"   ? loops<4, true>(format)
      : codes == "Levels<8, false>"  ? loops<8, false>(format)
      : codes == "Levels<8, true>"   ? loops<8, true>(format)
                                     : std::nullopt;
}

}  // namespace commhooks
