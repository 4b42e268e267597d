#include "shared/finite.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>

namespace commhooks {

// `isfinite().all()` makes several tensors of this size on the way; the smallest and the largest number
// tell as much, since NaN comes through.
at::Tensor all_finite(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return at::ones({}, tensor.options().dtype(at::kBool));
  }
  const auto [smallest, largest] = at::aminmax(tensor);
  return at::stack({smallest, largest}).isfinite().all();
}

}  // namespace commhooks
