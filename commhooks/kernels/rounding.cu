// Stochastic rounding.

#include "codecs/random.h"
#include "element.h"
#include "vector.h"

namespace commhooks::kernels {

using codecs::u64;

constexpr int kThreads = 256;

// Sets out to scale * values, rounded at random to one of the two neighbors.
__global__ void __launch_bounds__(kThreads)
    round_stochastically(const float* values, i64 numel, double scale, i64 seed, BFloat16* out) {
  for_each_vector<float>(numel, [&](i64 at) {
    const auto found = load(values, at, numel);
    Vector<BFloat16, Vector<float>::size> rounded;
    const auto random = codecs::random_for((u64)seed, (u64)at);
    for (int i = 0; i < Vector<float>::size; ++i) {
      const float product = found.items[i] * (float)scale;
      const u32 bits = codecs::stochastic_bfloat16(product, random.bits((u32)(at + i)));
      rounded.items[i].bits = (unsigned short)bits;
    }
    store(out, at, numel, rounded);
  });
}

}  // namespace commhooks::kernels
