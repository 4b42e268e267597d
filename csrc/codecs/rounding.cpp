#include "codecs/rounding.h"

#include "codecs/blocks.h"
#include "kernels/codecs/random.h"

#include <ATen/Parallel.h>

#include <algorithm>

namespace commhooks {
namespace {

constexpr int64_t kGrain = 1 << 15;  // the least numbers for one thread

COMMHOOKS_INLINE void round_range(
    const float* values,
    float scale,
    uint16_t* out,
    int64_t begin,
    int64_t end,
    const codecs::Random& random) {
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t bits = random.bits(static_cast<uint32_t>(i));
    out[i] = static_cast<uint16_t>(codecs::stochastic_bfloat16(values[i] * scale, bits));
  }
}

}  // namespace

void round_stochastically(
    const at::Tensor& values, double scale, const at::Tensor& out, uint64_t seed) {
  const auto* from = values.const_data_ptr<float>();
  auto* to = static_cast<uint16_t*>(out.mutable_data_ptr());
  at::parallel_for(0, values.numel(), kGrain, [&](int64_t begin, int64_t end) {
    on_widest([&](auto /*set*/) COMMHOOKS_ALWAYS_INLINE {
      while (begin < end) {  // up to the next multiple of 2^32, where other numbers begin
        const int64_t stop = std::min(end, ((begin >> 32) + 1) << 32);
        const auto random = codecs::random_for(seed, static_cast<uint64_t>(begin));
        round_range(from, static_cast<float>(scale), to, begin, stop, random);
        begin = stop;
      }
    });
  });
}

}  // namespace commhooks
