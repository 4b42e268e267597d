// Parameters whose gradients a step may not change.
#pragma once

#include "reducer/bucket.h"
#include "reducer/options.h"

#include <functional>
#include <utility>
#include <vector>

namespace commhooks {

// Note [Unused parameters]
// ~~~~~~~~~~~~~~~~~~~~~~~~
// A parameter that no rank used keeps its `.grad`; one that some rank used gets the average on all
// ranks, where the other ranks count as zeros. At the end of a step in which parameters may be
// unused, ranks therefore share which parameters they used, in this step and before it in
// `no_sync`: the element-wise maximum of one number per parameter, 2 * (gradients in this backward)
// + (whether used). Under a hook whose failure all ranks notice, they do so once the step has
// succeeded: what they share cannot be aborted. With `static_graph` this happens once, and the
// numbers also describe the graph to a rank that has run out of inputs.
//
// Averages of parameters that this rank used are written as soon as they are available; those of
// other parameters wait here until it is known whether any rank used them.
class UnusedParameters {
 public:
  explicit UnusedParameters(size_t parameters) : used_(parameters, 0) {}

  // `shares_use`: whether ranks share which parameters they used at the end of this step.
  void begin_step(bool shares_use) {
    shares_use_ = shares_use;
  }
  bool shares_use() const {
    return shares_use_;
  }

  // Notes that this rank uses the parameter, in this step or before it in `no_sync`.
  void add_use(size_t index) {
    used_[index] = 1;
  }
  bool uses_all() const;
  // Returns whether the gradient of the parameter may have to stay unchanged.
  bool may_include(size_t index) const {
    const auto& used = shares_use_ ? used_ : always_used_;
    return !used.empty() && !used[index];
  }

  // Copies the gradients of such parameters before the hook overwrites them. `parameters`: all
  // parameters of the reducer.
  void keep(
      const Bucket& bucket, const std::vector<at::Tensor>& parameters, const GradientStore& store);
  // Keeps `average`, which contains averages of such parameters.
  void defer(Bucket& bucket, at::Tensor average) {
    deferred_.emplace_back(&bucket, std::move(average));
  }

  // Starts sending the use on this rank to the ranks of each group. `gradients`: the number of
  // gradients per parameter in one backward, or empty.
  void start_sharing(
      const std::vector<GroupPtr>& groups, const std::vector<int>& gradients, c10::Device device);

  // Waits until ranks have shared their use, and throws if a peer is lost.
  void wait();

  // The result for each parameter, over the ranks that it is averaged over.
  struct Everywhere {
    std::vector<char> used;
    std::vector<int> gradients;  // how many in one backward
  };
  // `group_of`: the index of each parameter's group among the groups of `start_sharing`. Waits for
  // the other ranks and for the device; all work before it is only enqueued on the current stream.
  Everywhere finish_sharing(const std::vector<size_t>& group_of);

  // Calls `write(bucket, average, positions)` for the deferred averages of parameters that other
  // ranks used, but this rank did not, and drops the copies of the gradients of these parameters.
  void write_deferred(
      const Everywhere& everywhere,
      const std::function<void(Bucket&, const at::Tensor&, const std::vector<size_t>&)>& write);
  // Keeps the result for later steps, as the graph is static.
  void remember(const Everywhere& everywhere) {
    always_used_ = everywhere.used;
  }
  // Restores the gradients that were copied.
  void restore(const std::vector<at::Tensor>& parameters, const GradientStore& store);

  // Drops the copies and the averages of this step.
  void end_step();
  // Forgets the use, and sharing that is under way, whose errors are dropped.
  void forget_use();
  // Forgets what `remember` has kept.
  void forget_graph() {
    always_used_.clear();
  }

 private:
  bool shares_use_ = false;
  std::vector<char> used_;  // per parameter, on this rank
  std::vector<at::Tensor> maps_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::vector<std::pair<size_t, at::Tensor>> kept_;
  std::vector<std::pair<Bucket*, at::Tensor>> deferred_;
  std::vector<char> always_used_;  // the same on all ranks, with `static_graph`; empty until known
};

}  // namespace commhooks
