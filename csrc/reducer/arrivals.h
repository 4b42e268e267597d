// Which gradients of a step are there, and in which order they came.
#pragma once

#include <cstddef>
#include <vector>

namespace commhooks {

class Arrivals {
 public:
  explicit Arrivals(size_t parameters) : arrived_(parameters, 0) {}

  void begin_step();
  // Whether the parameter's gradient had not arrived yet.
  bool add(size_t index);
  // Those of an abandoned step tell nothing about the next one.
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
  // Whether they came in the order of the step before.
  bool came_as_before() const {
    return order_ == last_order_;
  }

 private:
  std::vector<char> arrived_;  // per parameter
  std::vector<size_t> order_;
  std::vector<size_t> last_order_;
};

}  // namespace commhooks
