// Makes the buckets of a reducer.
#pragma once

#include "reducer/bucket.h"
#include "reducer/reduction_groups.h"

#include <memory>
#include <vector>

namespace commhooks {

struct ReducerOptions;

// All buckets, which are replaced together when they are rebuilt.
struct BucketSet {
  struct Location {
    size_t bucket;
    size_t position;
  };

  std::vector<std::unique_ptr<Bucket>> all;
  std::vector<Location> locations;  // of each parameter
  std::vector<size_t> order;        // of parameters, from which the buckets were made
  bool back_to_front = false;       // whether they were made starting from its end
};

BucketSet make_buckets(
    const std::vector<at::Tensor>& parameters,
    const ReducerOptions& options,
    const ReductionGroups& groups,
    std::vector<size_t> order,
    bool back_to_front);

}  // namespace commhooks
