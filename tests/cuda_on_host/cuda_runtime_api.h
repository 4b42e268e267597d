// As much of CUDA's runtime as csrc/packing/cuda uses, for g++.
#pragma once

enum cudaError_t { cudaSuccess, cudaErrorNoKernelImageForDevice, cudaErrorUnknown };

inline const char* cudaGetErrorString(cudaError_t /*error*/) {
  return "the emulation refused a launch";
}

inline bool has_machine_code = true;
inline cudaError_t last_error = cudaSuccess;

struct cudaFuncAttributes {};
inline cudaError_t cudaFuncGetAttributes(
    cudaFuncAttributes* /*attributes*/, const void* /*kernel*/) {
  return last_error = has_machine_code ? cudaSuccess : cudaErrorNoKernelImageForDevice;
}
// Returns the error of the last call that failed, once, as CUDA does.
inline cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
