// Launches kernels.
#pragma once

#include <cuda_runtime_api.h>

namespace commhooks::cuda {

// Launches on `stream`, of the current device.
template <typename Table, typename Scale>
cudaError_t launch(
    void (*kernel)(Table, Scale, bool*),
    unsigned blocks,
    unsigned threads,
    cudaStream_t stream,
    const Table& table,
    Scale scale,
    bool* finite) {
  kernel<<<blocks, threads, 0, stream>>>(table, scale, finite);
  return cudaGetLastError();
}

}  // namespace commhooks::cuda
