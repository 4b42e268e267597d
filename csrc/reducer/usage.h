// Which parameters get gradients, on this rank and on any rank.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>
#include <vector>

namespace commhooks {

// Note [Unused parameters]
// ~~~~~~~~~~~~~~~~~~~~~~~~
// A parameter that no rank used keeps its `.grad`; one that some rank used gets the average on all
// ranks, where the other ranks count as zeros. At the end of a step in which parameters may be
// unused, ranks therefore exchange which parameters they used, in this step and before it in
// `no_sync`: the element-wise maximum of one number per parameter, 2 * (gradients in this backward)
// + (whether used). With `static_graph` this happens once, and the numbers also describe the graph
// to a rank that has run out of inputs.
class Usage {
 public:
  explicit Usage(size_t count) : used_(count, 0) {}

  void add(size_t index) {
    used_[index] = 1;
  }
  bool here(size_t index) const {
    return used_[index] != 0;
  }
  bool all_here() const;

  // Starts sending the use on this rank to the ranks of each group. `gradients`: the number of
  // gradients per parameter in one backward, or empty.
  void start_exchange(
      const std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>& groups,
      const std::vector<int>& gradients,
      c10::Device device);

  // The result for each parameter, over the ranks that it is averaged over.
  class Everywhere {
   public:
    explicit Everywhere(std::vector<int> numbers) : numbers_(std::move(numbers)) {}

    size_t size() const {
      return numbers_.size();
    }
    bool used(size_t index) const {
      return numbers_[index] > 0;
    }
    // The number of gradients in one backward.
    int gradients(size_t index) const {
      return numbers_[index] / 2;
    }

   private:
    std::vector<int> numbers_;
  };
  // `group_of`: the index of each parameter's group among the groups of `start_exchange`. Waits for
  // the other ranks and for the device; all work before it is only enqueued on the current stream.
  Everywhere finish_exchange(const std::vector<size_t>& group_of);

  // Forgets the use, and an exchange that is under way.
  void clear();

 private:
  std::vector<char> used_;
  std::vector<at::Tensor> maps_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace commhooks
