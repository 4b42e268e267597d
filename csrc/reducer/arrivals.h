// Which gradients of a step have arrived, and in which order.
#pragma once

#include <cstddef>
#include <vector>

namespace commhooks {

class Arrivals {
 public:
  explicit Arrivals(size_t parameters) : arrived_(parameters, No) {}

  void begin_step();
  // Notes the gradient of a parameter, or that this rank will have none; returns false if that was
  // known before.
  bool add(size_t index, bool used);
  // For an abandoned step, whose order may be incomplete.
  void forget_order() {
    order_.clear();
  }

  bool has(size_t index) const {
    return arrived_[index] != No;
  }
  bool any() const {
    return !order_.empty();
  }
  std::vector<size_t> missing() const;

  // Contains parameters without gradient, too.
  const std::vector<size_t>& order() const {
    return order_;
  }
  bool unused(size_t index) const {
    return arrived_[index] == Unused;
  }
  // Returns whether the order and the use of parameters are the same as in the step before.
  bool same_order_as_before() const {
    return order_ == last_order_ && arrived_ == last_arrived_;
  }

  // The use of parameters in the last step.
  struct Use {
    std::vector<size_t> order;   // parameters with a gradient, in the order of arrival
    std::vector<size_t> unused;  // parameters without
    bool is_constant = true;     // whether all steps have used the same parameters
  };
  Use last_use() const;

 private:
  enum Arrival : char { No, Used, Unused };

  bool use_is_constant() const;

  std::vector<Arrival> arrived_;  // per parameter
  std::vector<Arrival> last_arrived_;
  std::vector<size_t> order_;
  std::vector<size_t> last_order_;
  bool use_is_constant_ = true;  // up to the step before
};

}  // namespace commhooks
