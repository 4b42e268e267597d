#include "reducer/reduction_groups.h"

#include "reducer/native_hooks.h"

#include <algorithm>

namespace commhooks {

ReductionGroup::ReductionGroup(
    std::shared_ptr<Hook> hook, const GroupPtr& process_group, TransportPtr memory)
    : hook(std::move(hook)),
      process_group(process_group),
      memory(std::move(memory)),
      ranks(process_group->getSize()) {
  this->hook->use_transport(process_group, transport());
  format = this->hook->format();
  passes_through = this->hook->passes_through();
}

ReductionGroups::ReductionGroups(
    const GroupPtr& process_group,
    const std::map<int64_t, GroupPtr>& key_groups,
    TransportPtr memory)
    : process_groups_{process_group}, rank_(process_group->getRank()) {
  for (const auto& [key, group] : key_groups) {
    const auto known = std::find(process_groups_.begin(), process_groups_.end(), group);
    process_group_of_key_[key] = known - process_groups_.begin();
    if (known == process_groups_.end()) {
      process_groups_.push_back(group);
    }
  }
  for (const auto& group : process_groups_) {
    groups_.emplace_back(
        std::make_shared<AverageHook>(group, std::nullopt), group,
        group == process_group ? std::move(memory) : nullptr);
    groups_.emplace_back(
        std::make_shared<AverageHook>(group, std::nullopt, "sparse average"), group);
  }
}

size_t ReductionGroups::process_group_of(int64_t key) const {
  const auto own = process_group_of_key_.find(key);
  return own == process_group_of_key_.end() ? 0 : own->second;
}

void ReductionGroups::begin_step() {
  for (ReductionGroup& group : groups_) {
    group.buckets = 0;
    group.launched = 0;
  }
}

void ReductionGroups::abort(bool has_gradients) const {
  for (const ReductionGroup& group : groups_) {
    if (group.launched > 0 || (has_gradients && group.buckets > 0)) {
      group.hook->abort(/*has_run=*/group.launched > 0);
    }
  }
}

}  // namespace commhooks
