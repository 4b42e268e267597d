// Which gradients of a step have arrived, and in which order.
#pragma once

#include <cstddef>
#include <vector>

namespace commhooks {

class Arrivals {
 public:
  explicit Arrivals(size_t parameters) : arrived_(parameters, 0) {}

  void begin_step();
  // Notes the gradient of a parameter; returns false if it had arrived before.
  bool add(size_t index);
  // For an abandoned step, whose order may be incomplete.
  void forget_order() {
    order_.clear();
  }

  bool has(size_t index) const {
    return arrived_[index] != 0;
  }
  bool any() const {
    return !order_.empty();
  }
  std::vector<size_t> missing() const;

  const std::vector<size_t>& order() const {
    return order_;
  }
  // Returns whether the order is the same as in the step before.
  bool same_order_as_before() const {
    return order_ == last_order_;
  }

 private:
  std::vector<char> arrived_;  // per parameter
  std::vector<size_t> order_;
  std::vector<size_t> last_order_;
};

}  // namespace commhooks
