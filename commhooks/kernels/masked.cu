// A copy that depends on a condition in device memory. Without the copy the target is not written.

#include "codecs/portable.h"
#include "vector.h"

namespace commhooks::kernels {

using codecs::u8;

constexpr int kThreads = 256;

// Copies `from` to `to` if `condition` is true.
__global__ void __launch_bounds__(kThreads)
    copy_if(const u8* condition, const u8* from, i64 bytes, u8* to) {
  if (*condition) {
    for_each_vector<u8>(bytes, [&](i64 at) { store(to, at, bytes, load(from, at, bytes)); });
  }
}

}  // namespace commhooks::kernels
