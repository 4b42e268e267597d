#include "reducer/gradient_tracker.h"

#include <algorithm>

namespace commhooks {

void GradientTracker::begin_step(std::vector<size_t> absent) {
  absent_ = std::move(absent);
  for (size_t index = 0; index < expected_.size(); ++index) {
    if (expected_[index] == 0) {
      absent_.push_back(index);
    }
  }
  expects_local_ = false;
  use_is_constant_ = use_is_constant();
  if (!order_.empty()) {  // otherwise another forward has announced the same backward
    last_order_ = std::exchange(order_, {});
    last_arrived_ = arrived_;
  }
  std::fill(arrived_.begin(), arrived_.end(), No);
  watched_.clear();
  left_ = expected_;
}

bool GradientTracker::add(size_t index, bool used) {
  if (arrived_[index] != No) {
    return false;
  }
  arrived_[index] = used ? Used : Unused;
  order_.push_back(index);
  return true;
}

std::vector<size_t> GradientTracker::missing() const {
  std::vector<size_t> indices;
  for (size_t index = 0; index < arrived_.size(); ++index) {
    if (arrived_[index] == No) {
      indices.push_back(index);
    }
  }
  return indices;
}

std::vector<int64_t> GradientTracker::encoded_order() const {
  const size_t count = arrived_.size();
  if (options_.graph_may_change() && (order_ != last_order_ || arrived_ != last_arrived_)) {
    return std::vector<int64_t>(count, -1);
  }
  std::vector<int64_t> codes;
  for (const size_t index : order_) {
    codes.push_back(static_cast<int64_t>(arrived_[index] == Unused ? index + count : index));
  }
  return codes;
}

bool GradientTracker::use_is_constant() const {
  const bool compares = !order_.empty() && !last_order_.empty();
  return use_is_constant_ && (!compares || arrived_ == last_arrived_);
}

GradientTracker::Use GradientTracker::last_use() const {
  Use use;
  use.is_constant = use_is_constant();
  const bool has_begun = order_.empty();  // the step after it
  const auto& arrived = has_begun ? last_arrived_ : arrived_;
  for (const size_t index : has_begun ? last_order_ : order_) {
    (arrived[index] == Used ? use.order : use.unused).push_back(index);
  }
  return use;
}

void GradientTracker::learn() {
  expected_.assign(arrived_.size(), 0);
  std::vector<size_t> by_last;
  for (auto index = watched_.rbegin(); index != watched_.rend(); ++index) {
    if (expected_[*index]++ == 0) {
      by_last.push_back(*index);
    }
  }
  watched_.clear();
  for (auto index = by_last.rbegin(); index != by_last.rend(); ++index) {
    add(*index, /*used=*/true);
  }
  for (const size_t index : missing()) {
    add(index, /*used=*/false);
  }
}

}  // namespace commhooks
