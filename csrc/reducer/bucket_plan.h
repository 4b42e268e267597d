// Which parameters travel together.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace commhooks {

struct BucketCaps {
  int64_t
      first_bytes;  // of the first bucket of each key: small, so that communication starts early
  int64_t bytes;    // of all others
};

// Cuts parameters into buckets of at least the cap's size (the last one of a key may be smaller).
//
// `order` holds indices into `parameters` in the order in which gradients are expected. A bucket only
// holds parameters of one dtype, device and group (`groups[i]` is the caller's own key of parameter
// i). Buckets come out in the order in which their last gradient is expected. A pure function: equal
// arguments give equal plans on all ranks.
std::vector<std::vector<size_t>> plan_buckets(
    const std::vector<at::Tensor>& parameters,
    const std::vector<int64_t>& groups,
    const std::vector<size_t>& order,
    const BucketCaps& caps);

}  // namespace commhooks
