#include "reducer/arrivals.h"

#include <algorithm>
#include <utility>

namespace commhooks {

void Arrivals::begin_step() {
  last_order_ = std::exchange(order_, {});
  std::fill(arrived_.begin(), arrived_.end(), 0);
}

bool Arrivals::add(size_t index) {
  if (has(index)) {
    return false;
  }
  arrived_[index] = 1;
  order_.push_back(index);
  return true;
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
