// Changes that a verdict, on the device, decides about. What is not to change is not touched.

#include "codecs/portable.h"
#include "vector.h"

namespace commhooks::kernels {

using codecs::u8;

constexpr int kThreads = 256;

// to = from, if the verdict is true.
__global__ void __launch_bounds__(kThreads)
    copy_if(const u8* verdict, const u8* from, i64 bytes, u8* to) {
  if (*verdict) {
    for_each_vector<u8>(bytes, [&](i64 at) { store(to, at, bytes, load(from, at, bytes)); });
  }
}

}  // namespace commhooks::kernels
