// As much of CUDA's runtime as csrc/packing/cuda uses, for g++.
#pragma once

enum cudaError_t { cudaSuccess, cudaErrorUnknown };

inline const char* cudaGetErrorString(cudaError_t /*error*/) {
  return "the emulation refused a launch";
}
