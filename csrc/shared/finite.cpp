#include "shared/finite.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>

namespace commhooks {

// `isfinite().all()` allocates several tensors of the same size; the smallest and the largest
// number are sufficient, since both are NaN if any number is.
at::Tensor all_finite(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return at::ones({}, tensor.options().dtype(at::kBool));
  }
  const auto [smallest, largest] = at::aminmax(tensor);
  return at::stack({smallest, largest}).isfinite().all();
}

}  // namespace commhooks
