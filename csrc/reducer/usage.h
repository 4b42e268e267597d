// Which parameters get gradients: on this rank, and on any.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>
#include <vector>

namespace commhooks {

// Note [Unused parameters]
// ~~~~~~~~~~~~~~~~~~~~~~~~
// A parameter that no rank used keeps its `.grad` as it is; one that some rank used gets the average on
// all ranks, in which the others count as zeros. So at the end of a step in which parameters may be
// unused, ranks tell each other what they used, here and in `no_sync` before: the element-wise maximum
// of one number per parameter, 2·(gradients in this backward) + (whether used). Under `static_graph`
// that happens once, and the numbers also tell a rank that was out of inputs what the graph is like.
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

  // Sends what this rank used to the ranks of each group. `gradients`: in one backward, or empty.
  void start_exchange(
      const std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>& groups,
      const std::vector<int>& gradients,
      c10::Device device);

  // Per parameter: what came of it among the ranks that it is averaged over.
  class Everywhere {
   public:
    explicit Everywhere(std::vector<int> numbers) : numbers_(std::move(numbers)) {}

    size_t size() const {
      return numbers_.size();
    }
    bool used(size_t index) const {
      return numbers_[index] > 0;
    }
    // In one backward.
    int gradients(size_t index) const {
      return numbers_[index] / 2;
    }

   private:
    std::vector<int> numbers_;
  };
  // `group_of`: of each parameter, among the groups of `start_exchange`. Waits for the other ranks, and
  // for the device; everything before this is only enqueued on the current stream.
  Everywhere finish_exchange(const std::vector<size_t>& group_of);

  // Forgets what was used, and an exchange that is under way.
  void clear();

 private:
  std::vector<char> used_;
  std::vector<at::Tensor> maps_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace commhooks
