// The hooks of a reducer, and the ranks that each averages over.
#pragma once

#include "reducer/hook.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>
#include <memory>
#include <vector>

namespace commhooks {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// Note [Lanes]
// ~~~~~~~~~~~~
// Not all buckets go to the hook that users choose. A lane is a hook and the ranks it averages over:
// lane 0 is the users'; sparse gradients have one of their own, and so has each key with a process
// group of its own. A hook sees the buckets of its lane only, numbered from 0. The order of launches is
// that of the buckets, over all lanes.
struct Lane {
  std::shared_ptr<Hook> hook;
  GroupPtr process_group;

  // --- of the current step ---
  size_t buckets = 0;
  size_t launched = 0;  // of these
};

class Lanes {
 public:
  // `key_groups`: of keys whose parameters are averaged elsewhere. All hooks average plainly.
  Lanes(const GroupPtr& process_group, const std::map<int64_t, GroupPtr>& key_groups);

  // For parameters with this key.
  size_t index_of(int64_t key, bool is_sparse) const {
    return 2 * group_of(key) + (is_sparse ? 1 : 0);
  }
  // Index into `groups()`.
  size_t group_of(int64_t key) const;

  // All ranks that are averaged over, each group once; first the users'.
  const std::vector<GroupPtr>& groups() const {
    return groups_;
  }
  Lane& operator[](size_t index) {
    return lanes_[index];
  }
  const Lane& operator[](size_t index) const {
    return lanes_[index];
  }
  Lane& of_users() {
    return lanes_.front();
  }
  const Lane& of_users() const {
    return lanes_.front();
  }

  void begin_step();
  // To all hooks.
  void abandon();

 private:
  std::vector<GroupPtr> groups_;
  std::map<int64_t, size_t> group_of_key_;  // of keys that have one of their own
  std::vector<Lane> lanes_;                 // per group, one for dense and one for sparse gradients
};

}  // namespace commhooks
