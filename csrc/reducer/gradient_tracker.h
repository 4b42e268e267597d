// Tracks which gradients of a step have arrived, in which order, and what that says of the graph.
#pragma once

#include "reducer/options.h"

#include <cstddef>
#include <utility>
#include <vector>

namespace commhooks {

// Guarded by the mutex of the turn.
//
// Note [Static graph]
// ~~~~~~~~~~~~~~~~~~~
// With `static_graph`, the first backward only counts how many gradients each parameter gets, and
// reduces everything at its end. In later backwards a parameter has arrived with the last of its
// gradients, and parameters that get none are not waited for.
class GradientTracker {
 public:
  // Keeps a reference to `options`.
  explicit GradientTracker(const ReducerOptions& options)
      : options_(options), arrived_(options.names.size(), No) {}

  // `absent`: parameters that will get no gradient, as the graph does not reach them.
  void begin_step(std::vector<size_t> absent);
  const std::vector<size_t>& absent() const {
    return absent_;
  }
  // Returns these parameters, and those that a static graph does not use, for the first time.
  std::vector<size_t> take_absent() {
    return std::exchange(absent_, {});
  }

  // --- backward ---

  // Returns whether a backward begins: whether the last one has ended.
  bool begin_backward() {
    return !std::exchange(in_backward_, true);
  }
  void end_backward() {
    in_backward_ = false;
  }

  // Notes the gradient of a parameter, or that this rank will have none; returns false if that was
  // known before.
  bool add(size_t index, bool used);
  // Whether any gradient has arrived in this step.
  bool any() const {
    return !order_.empty() || !watched_.empty();
  }
  std::vector<size_t> missing() const;

  // Until the next step, gradients outside a step are not unexpected.
  void expect_local() {
    expects_local_ = true;
  }
  bool expects_local() const {
    return expects_local_;
  }
  // The order of an aborted step may be incomplete.
  void forget_order() {
    order_.clear();
  }

  // --- the graph ---

  // Returns a code for each parameter in the order of arrival: its index, plus the number of
  // parameters if this rank does not use it. If the graph may change, it has to be the same twice;
  // otherwise all codes are -1.
  std::vector<int64_t> encoded_order() const;

  // The use of parameters in the last step.
  struct Use {
    std::vector<size_t> order;   // parameters with a gradient, in the order of arrival
    std::vector<size_t> unused;  // parameters without
    bool is_constant = true;     // whether all steps have used the same parameters
  };
  Use last_use() const;

  // Whether this is the first backward of a static graph.
  bool is_learning() const {
    return options_.static_graph && expected_.empty();
  }
  void watch(size_t index) {
    watched_.push_back(index);
  }
  // Ends the first backward: the graph is known, and all parameters have arrived. Those that got
  // gradients are in the order of the last one of each.
  void learn();
  // Takes the graph from other ranks, on a rank that had no backward.
  void set_expected(std::vector<int> gradients) {
    expected_ = std::move(gradients);
  }
  void forget_graph() {
    expected_.clear();
  }

  // The number of gradients of each parameter in one backward; empty if the graph is not known.
  const std::vector<int>& expected() const {
    return expected_;
  }
  bool expects_more(size_t index) const {
    return left_[index] > 0;
  }
  // Counts one gradient; returns whether it was the last one.
  bool count(size_t index) {
    return --left_[index] == 0;
  }

 private:
  enum Arrival : char { No, Used, Unused };

  bool use_is_constant() const;

  const ReducerOptions& options_;
  std::vector<size_t> absent_;
  bool in_backward_ = false;
  bool expects_local_ = false;

  std::vector<Arrival> arrived_;  // per parameter
  std::vector<Arrival> last_arrived_;
  std::vector<size_t> order_;  // contains parameters without gradient, too
  std::vector<size_t> last_order_;
  bool use_is_constant_ = true;  // up to the step before

  std::vector<size_t> watched_;  // once for each gradient, in the order of arrival
  std::vector<int> expected_;
  std::vector<int> left_;  // gradients per parameter that have yet to arrive in this step
};

}  // namespace commhooks
