// Whether all numbers of a tensor are finite, on any device.
#pragma once

#include <ATen/core/Tensor.h>

namespace commhooks {

// Returns a () bool tensor on the device of `tensor`; true for an empty tensor. One pass over the
// memory, enqueued on the current stream without waiting.
at::Tensor all_finite(const at::Tensor& tensor);

}  // namespace commhooks
