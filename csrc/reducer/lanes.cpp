#include "reducer/lanes.h"

#include "reducer/native_hooks.h"

#include <algorithm>

namespace commhooks {

Lanes::Lanes(const GroupPtr& process_group, const std::map<int64_t, GroupPtr>& key_groups)
    : groups_{process_group} {
  for (const auto& [key, group] : key_groups) {
    const auto known = std::find(groups_.begin(), groups_.end(), group);
    group_of_key_[key] = known - groups_.begin();
    if (known == groups_.end()) {
      groups_.push_back(group);
    }
  }
  for (const auto& group : groups_) {
    lanes_.push_back({std::make_shared<AverageHook>(group, std::nullopt), group});
    lanes_.push_back({std::make_shared<SparseAverageHook>(group), group});
  }
}

size_t Lanes::group_of(int64_t key) const {
  const auto own = group_of_key_.find(key);
  return own == group_of_key_.end() ? 0 : own->second;
}

void Lanes::begin_step() {
  for (Lane& lane : lanes_) {
    lane.buckets = 0;
    lane.launched = 0;
  }
}

void Lanes::abandon() {
  for (const Lane& lane : lanes_) {
    lane.hook->abandon();
  }
}

}  // namespace commhooks
