// Makes the buckets of a reducer.
#pragma once

#include "reducer/bucket.h"
#include "reducer/options.h"
#include "reducer/reduction_groups.h"

#include <memory>
#include <vector>

namespace commhooks {

// All buckets, which are replaced together when they are rebuilt.
struct BucketSet {
  struct Location {
    size_t bucket;
    size_t position;
  };

  std::vector<std::unique_ptr<Bucket>> all;
  std::vector<Location> locations;  // of each parameter
  std::vector<size_t> order;        // of parameters, from which the buckets were made
};

// Divides parameters into buckets of at least the sizes in `bucket_bytes` (the last one of a key
// may be smaller). `order` has the indices of the parameters in the order in which their gradients
// are expected. A bucket only has parameters of one dtype, device and key, and a sparse gradient
// has one of its own. Buckets are in the order in which their last gradients are expected, those
// with `late_key` last. Equal arguments give equal buckets on all ranks.
BucketSet make_buckets(
    const std::vector<at::Tensor>& parameters,
    const ReducerOptions& options,
    const ReductionGroups& groups,
    std::vector<size_t> order);

}  // namespace commhooks
