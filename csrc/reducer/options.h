// The settings of a reducer.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace commhooks {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

struct ReducerOptions {
  std::vector<std::string> names;          // one per parameter
  std::vector<int64_t> keys;               // one per parameter; only equal ones share a bucket
  std::vector<bool> sparse;                // one per parameter: whether its gradient is sparse
  std::map<int64_t, GroupPtr> key_groups;  // process groups of keys that are averaged elsewhere
  std::optional<int64_t> late_key;         // buckets with this key are launched after all others
  std::vector<int64_t> bucket_bytes;  // of the first bucket of each key, of the second, and so on;
                                      // the last value is for all others
  bool find_unused_parameters = false;
  bool static_graph = false;
  bool gradient_as_bucket_view = false;
  bool stable_buckets = false;       // never rebuild into arrival order
  bool skip_unused_buckets = false;  // skip buckets that no rank uses in this forward
  bool release_buckets = false;      // free memory between steps

  // Whether this rank searches for parameters that a backward does not use.
  bool allows_unused() const {
    return find_unused_parameters || static_graph;
  }
  // Whether each backward may use other parameters.
  bool graph_may_change() const {
    return find_unused_parameters && !static_graph;
  }
};

}  // namespace commhooks
