// The hooks of a reducer, and the ranks that each of them averages over.
#pragma once

#include "reducer/hook.h"
#include "reducer/options.h"

#include <map>
#include <memory>
#include <vector>

namespace commhooks {

// Note [Reduction groups]
// ~~~~~~~~~~~~~~~~~~~~~~~
// Not all buckets go to the hook that users choose. A reduction group is a hook and the ranks it
// averages over. Group 0 has the users' hook; sparse gradients have a group of their own, and so
// has each key with its own process group. A hook sees only the buckets of its group, numbered from
// 0. Buckets are launched in their order, whatever their groups.
struct ReductionGroup {
  ReductionGroup(
      std::shared_ptr<Hook> hook, const GroupPtr& process_group, TransportPtr memory = nullptr);

  // The way that a hook in C++ may average; null if there is none.
  TransportPtr transport() const {
    return memory && memory->size() == ranks ? memory : nullptr;
  }

  std::shared_ptr<Hook> hook;
  GroupPtr process_group;
  TransportPtr memory;  // that the buckets of dense gradients are in; may be null
  // The answers of the hook and the process group, which may be written in Python.
  PackFormat format;
  bool passes_through;
  int64_t ranks;

  // Of the current step: how many buckets the hook gets, and how many it got so far.
  size_t buckets = 0;
  size_t launched = 0;
};

class ReductionGroups {
 public:
  // `key_groups`: the process groups of keys whose parameters are averaged over other ranks.
  // `memory`: between ranks of `process_group`; may be null. Every group starts with the hook that
  // averages.
  ReductionGroups(
      const GroupPtr& process_group,
      const std::map<int64_t, GroupPtr>& key_groups,
      TransportPtr memory);

  // Returns the index of the reduction group for parameters with this key.
  size_t index_of(int64_t key, bool is_sparse) const {
    return 2 * process_group_of(key) + (is_sparse ? 1 : 0);
  }
  // Returns an index into `process_groups()`.
  size_t process_group_of(int64_t key) const;

  // Each process group once, the default one first.
  const std::vector<GroupPtr>& process_groups() const {
    return process_groups_;
  }
  // The rank in the default process group.
  int rank() const {
    return rank_;
  }
  // For messages: "[Rank 0] ".
  std::string rank_prefix() const {
    return c10::str("[Rank ", rank_, "] ");
  }
  ReductionGroup& operator[](size_t index) {
    return groups_[index];
  }
  const ReductionGroup& operator[](size_t index) const {
    return groups_[index];
  }
  ReductionGroup& of_users() {
    return groups_.front();
  }
  const ReductionGroup& of_users() const {
    return groups_.front();
  }

  void begin_step();
  // Calls `abort` of the hooks that have buckets of this step. With `has_gradients`, when peers may
  // be ahead, also of those whose buckets have not been launched.
  void abort(bool has_gradients) const;

 private:
  std::vector<GroupPtr> process_groups_;
  int rank_;
  std::map<int64_t, size_t> process_group_of_key_;  // only keys that have their own
  std::vector<ReductionGroup> groups_;  // two per process group: for dense and for sparse gradients
};

}  // namespace commhooks
