#include "reducer/layout.h"

#include <ATen/ops/as_strided.h>

#include <algorithm>

namespace commhooks {

std::vector<int64_t> gradient_strides(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) {
    return parameter.strides().vec();
  }
  std::vector<int64_t> strides(parameter.dim());
  int64_t stride = 1;
  for (int64_t dim = parameter.dim() - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    stride *= std::max<int64_t>(parameter.size(dim), 1);
  }
  return strides;
}

at::Tensor gradient_view(const at::Tensor& flat, const at::Tensor& parameter, int64_t offset) {
  return flat.as_strided(
      parameter.sizes(), gradient_strides(parameter), flat.storage_offset() + offset);
}

}  // namespace commhooks
