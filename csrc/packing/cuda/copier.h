// Gradients on CUDA devices.
#pragma once

#include "packing/copier.h"

namespace commhooks::cuda {

// Pieces by one launch of the kernels in cuda/convert.h, tensors of other strides by another one.
std::unique_ptr<Copier> make_copier(c10::Device device);

}  // namespace commhooks::cuda
