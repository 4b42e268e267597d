// Assigns parameters to buckets.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace commhooks {

// Bytes of the first bucket of each key, of the second, and so on; the last value is for all
// others.
using BucketCaps = std::vector<int64_t>;

// Divides parameters into buckets of at least the size of the cap (the last one of a key may be
// smaller), and returns the indices of the parameters in each bucket.
//
// `order` has indices into `parameters` in the order in which gradients are expected. A bucket only
// has parameters of one dtype, device and key (`keys[i]` is the key of parameter i). Buckets are in
// the order in which their last gradients are expected. A pure function: equal arguments give equal
// results on all ranks.
std::vector<std::vector<size_t>> plan_buckets(
    const std::vector<at::Tensor>& parameters,
    const std::vector<int64_t>& keys,
    const std::vector<size_t>& order,
    const BucketCaps& caps);

}  // namespace commhooks
