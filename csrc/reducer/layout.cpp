#include "reducer/layout.h"

#include <ATen/ops/as_strided.h>

namespace commhooks {

at::Tensor gradient_view(const at::Tensor& flat, const at::Tensor& parameter, int64_t offset) {
  const int64_t start = flat.storage_offset() + offset;
  if (parameter.is_non_overlapping_and_dense()) {
    return flat.as_strided(parameter.sizes(), parameter.strides(), start);
  }
  return flat.narrow(0, offset, parameter.numel()).view(parameter.sizes());
}

}  // namespace commhooks
