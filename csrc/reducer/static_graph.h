// What the reducer learns of a graph that is the same in every backward.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace commhooks {

// Note [Static graph]
// ~~~~~~~~~~~~~~~~~~~
// The first backward only watches, and reduces everything at its end. It shows how many gradients each
// parameter gets; from then on a parameter has arrived with the last of them, and one that gets none is
// not waited for.
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
  // Ends it: the graph is known. Returns the parameters that got gradients, by the last that each got.
  std::vector<size_t> learn();
  // On a rank that had no backward of its own: what the others have learnt.
  void take_over(std::vector<int> gradients) {
    expected_ = std::move(gradients);
  }

  // --- all others; `index` of a graph that is known ---

  // In one backward.
  int expected(size_t index) const {
    return expected_[index];
  }
  // Per parameter; empty where the graph is not known.
  const std::vector<int>& expected() const {
    return expected_;
  }
  bool expects_more(size_t index) const {
    return left_[index] > 0;
  }
  // Whether it was the last one.
  bool count(size_t index) {
    return --left_[index] == 0;
  }

 private:
  size_t parameters_;
  std::vector<size_t> watched_;  // once for each gradient, in the order of arrival
  std::vector<int> expected_;    // gradients per parameter; empty until known
  std::vector<int> left_;        // of those, in this step
};

}  // namespace commhooks
