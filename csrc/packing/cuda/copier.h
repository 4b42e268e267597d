// The copier for gradients on CUDA devices.
#pragma once

#include "packing/copier.h"

namespace commhooks::cuda {

// Copies pieces with one launch of the kernels in packing/cuda/convert.h, and tensors of other
// strides with another. Null if the kernels were not compiled for this device.
std::unique_ptr<Copier> make_copier(c10::Device device);

}  // namespace commhooks::cuda
