// Which parameters travel together.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace commhooks {

// Bytes of the first bucket of each key, of the second, and so on; the last one is for all that follow.
using BucketCaps = std::vector<int64_t>;

// Cuts parameters into buckets of at least the cap's size (the last one of a key may be smaller).
//
// `order` holds indices into `parameters` in the order in which gradients are expected. A bucket only
// holds parameters of one dtype, device and key (`keys[i]` is the caller's, of parameter i). Buckets come out in the order in which their last gradient is expected. A pure function: equal
// arguments give equal plans on all ranks.
std::vector<std::vector<size_t>> plan_buckets(
    const std::vector<at::Tensor>& parameters,
    const std::vector<int64_t>& keys,
    const std::vector<size_t>& order,
    const BucketCaps& caps);

}  // namespace commhooks
