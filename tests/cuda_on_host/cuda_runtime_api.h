// As much of CUDA's runtime as csrc/packing/cuda uses, for g++.
#pragma once

enum cudaError_t { cudaSuccess, cudaErrorUnknown };

inline const char* cudaGetErrorString(cudaError_t /*error*/) {
  return "the emulation refused a launch";
}

struct cudaFuncAttributes {};
inline cudaError_t cudaFuncGetAttributes(
    cudaFuncAttributes* /*attributes*/, const void* /*kernel*/) {
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
