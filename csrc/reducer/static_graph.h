// What the reducer learns about a graph that is the same in every backward.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace commhooks {

// Note [Static graph]
// ~~~~~~~~~~~~~~~~~~~
// The first backward only counts how many gradients each parameter gets, and reduces everything at
// its end. In later backwards a parameter has arrived with the last of its gradients, and
// parameters that get none are not waited for.
class StaticGraph {
 public:
  explicit StaticGraph(size_t parameters) : parameters_(parameters) {}

  bool is_known() const {
    return !expected_.empty();
  }
  void forget() {
    expected_.clear();
  }
  void begin_step();

  // --- the first backward ---

  void watch(size_t index) {
    watched_.push_back(index);
  }
  bool has_watched() const {
    return !watched_.empty();
  }
  // Ends the first backward: the graph is known now. Returns the parameters that got gradients, in
  // the order of the last gradient of each.
  std::vector<size_t> learn();
  // Takes the graph from other ranks, on a rank that had no backward.
  void set_expected(std::vector<int> gradients) {
    expected_ = std::move(gradients);
  }

  // --- later backwards, once the graph is known ---

  // The number of gradients of a parameter in one backward.
  int expected(size_t index) const {
    return expected_[index];
  }
  // The same for all parameters; empty if the graph is not known.
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
  size_t parameters_;
  std::vector<size_t> watched_;  // once for each gradient, in the order of arrival
  std::vector<int> expected_;    // gradients per parameter; empty until known
  std::vector<int> left_;        // gradients per parameter that have yet to arrive in this step
};

}  // namespace commhooks
