#include "reducer/arrivals.h"

#include <algorithm>
#include <utility>

namespace commhooks {

void Arrivals::begin_step() {
  use_is_constant_ = use_is_constant();
  last_order_ = std::exchange(order_, {});
  last_arrived_ = arrived_;
  std::fill(arrived_.begin(), arrived_.end(), No);
}

bool Arrivals::add(size_t index, bool used) {
  if (has(index)) {
    return false;
  }
  arrived_[index] = used ? Used : Unused;
  order_.push_back(index);
  return true;
}

bool Arrivals::use_is_constant() const {
  const bool compares = any() && !last_order_.empty();
  return use_is_constant_ && (!compares || arrived_ == last_arrived_);
}

Arrivals::Use Arrivals::last_use() const {
  Use use;
  use.is_constant = use_is_constant();
  const auto& arrived = any() ? arrived_ : last_arrived_;  // a step may have begun
  for (const size_t index : any() ? order_ : last_order_) {
    (arrived[index] == Used ? use.order : use.unused).push_back(index);
  }
  return use;
}

std::vector<size_t> Arrivals::missing() const {
  std::vector<size_t> indices;
  for (size_t index = 0; index < arrived_.size(); ++index) {
    if (!has(index)) {
      indices.push_back(index);
    }
  }
  return indices;
}

}  // namespace commhooks
