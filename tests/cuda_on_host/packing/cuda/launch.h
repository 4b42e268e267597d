// Starts kernels on the host. In the place of csrc/packing/cuda/launch.h.
#pragma once

#include "cuda_emulation.h"
#include "cuda_runtime_api.h"

namespace commhooks::cuda {

inline int launches = 0;

template <typename Table, typename Scale>
cudaError_t launch(
    void (*kernel)(Table, Scale, bool*),
    unsigned blocks,
    unsigned threads,
    cudaStream_t /*stream*/,
    const Table& table,
    Scale scale,
    bool* finite) {
  ++launches;
  emulation::machine.kernel = [&] { kernel(table, scale, finite); };
  const bool has_run = emulation::run_grid({blocks, 1, 1}, {threads, 1, 1});
  return has_run ? cudaGetLastError() : cudaErrorUnknown;
}

}  // namespace commhooks::cuda
