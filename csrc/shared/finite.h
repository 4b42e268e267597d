// Whether a tensor's numbers are finite, on whatever device.
#pragma once

#include <ATen/core/Tensor.h>

namespace commhooks {

// () bool on the tensor's device; true for an empty tensor. One pass over its memory. Enqueued on the
// current stream and not waited for.
at::Tensor all_finite(const at::Tensor& tensor);

}  // namespace commhooks
