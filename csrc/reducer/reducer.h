// Averages gradients over ranks while backward is still computing others.
#pragma once

#include "reducer/bucket.h"
#include "reducer/bucket_plan.h"
#include "reducer/hook.h"
#include "reducer/step_state.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace commhooks {

// A shared or an intrusive pointer, depending on torch's version.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

struct ReducerOptions {
  std::vector<std::string> names;  // one per parameter
  std::vector<int64_t> groups;     // one per parameter; only equal ones share a bucket
  BucketCaps caps;
  bool find_unused_parameters = false;
  bool static_graph = false;
  bool gradient_as_bucket_view = false;
  bool stable_buckets = false;  // never rebuild into arrival order
};

// Note [How a gradient travels]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
//   1. `prepare_for_backward` (from forward): Idle -> Collecting.
//   2. Autograd accumulates a parameter's gradient and calls `on_gradient`, which counts down the
//      parameter's bucket.
//   3. `launch_ready_buckets`: each complete bucket whose predecessors have been launched is packed
//      and handed to the hook, on the thread that runs backward. The order of buckets is thus the same
//      on all ranks, whatever the order of gradients.
//   4. `on_backward_end` (an autograd callback, queued by the first gradient of each backward): once
//      all buckets are with the hook, Collecting -> Draining; wait for each in order, write it back;
//      Draining -> Idle.
//
// Locks: `mutex_` guards the bookkeeping and is held for instants only, never while a hook runs, while
// memory is copied, or while anything is waited for. `launch_mutex_` keeps launches in order when
// several autograd threads (one per device) complete buckets at once; taken before `mutex_`.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // Attaches to the gradient accumulators of `parameters`; the hooks vanish with the reducer.
  static std::shared_ptr<Reducer> create(
      std::vector<at::Tensor> parameters,
      ReducerOptions options,
      c10::intrusive_ptr<c10d::ProcessGroup> process_group);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Announces that the next backward synchronises. `outputs`: those of the forward, needed to find
  // unused parameters (`needs_outputs()`), else may be empty. Throws if the previous backward left
  // parameters without gradients.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);
  bool needs_outputs() const {
    return options_.find_unused_parameters || options_.static_graph;
  }

  // Once, after the first synchronised step: cuts the buckets anew, in the order in which rank 0 saw
  // its gradients arrive. A collective call, to be made before forward. Returns whether it did.
  bool rebuild_buckets();

  // Between steps only.
  void set_hook(std::shared_ptr<Hook> hook);

  // Ends the current step, if there is one: waits for what the hook holds and forgets it.
  void abandon() noexcept;

  struct BucketInfo {
    std::shared_ptr<const BucketLayout> layout;
    int64_t bytes;
    BucketStats stats;
  };
  std::vector<BucketInfo> buckets() const;
  void reset_stats();

  // Synchronised backward passes so far; `GradBucket::step` of the next one. Set when training resumes.
  int64_t steps() const;
  void set_steps(int64_t steps);

 private:
  Reducer(
      std::vector<at::Tensor> parameters,
      ReducerOptions options,
      c10::intrusive_ptr<c10d::ProcessGroup> process_group);

  struct Location {
    size_t bucket;
    size_t position;
  };
  class BackwardGuard;

  void attach();
  void set_buckets(const std::vector<std::vector<size_t>>& plan);
  void begin_step_locked();

  void on_gradient(size_t index);
  void on_backward_start();
  void queue_backward_end_locked();
  void on_backward_end();
  void mark_unused_locked();
  void arrive_locked(size_t index);
  void end_discovery_locked();

  void launch_ready_buckets();
  void launch(size_t bucket_index);
  void reduce_used_map();
  void drain();
  void write_back(Bucket& bucket, const at::Tensor& result);
  void finish_unused(std::vector<std::pair<Bucket*, at::Tensor>>& unfinished);

  bool dynamic_graph_locked() const {
    return options_.find_unused_parameters && !options_.static_graph;
  }
  // The first backward under `static_graph` only watches, and reduces everything at its end.
  bool discovering_locked() const {
    return options_.static_graph && expected_hits_.empty();
  }
  bool tracks_use_locked() const {
    return dynamic_graph_locked() || discovering_locked();
  }
  // Whether the parameter's gradient may have to stay as it is.
  bool may_be_unused(size_t index) const {
    return tracks_use_ ? !used_[index] : !globally_unused_.empty() && globally_unused_[index];
  }
  std::string describe(const std::vector<size_t>& indices) const;
  std::string rank_prefix() const;

  const std::vector<at::Tensor> parameters_;
  const ReducerOptions options_;
  const c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  std::vector<std::pair<uintptr_t, NodePtr>> accumulators_;  // with the key of our hook in each

  mutable std::mutex mutex_;
  std::mutex launch_mutex_;

  std::shared_ptr<Hook> hook_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  std::vector<Location> locations_;  // of each parameter
  bool rebuilt_ = false;
  int64_t completed_ = 0;   // synchronised backward passes of this reducer
  int64_t first_step_ = 0;  // and those that came before it

  // --- of the current step ---
  StepState state_;
  std::vector<char> arrived_;  // per parameter
  std::vector<size_t> arrival_order_;
  std::vector<size_t> unreachable_;  // parameters outside the graph of this forward
  bool unused_marked_ = false;
  bool tracks_use_ = false;  // whether ranks tell each other what they used
  bool end_queued_ = false;  // `on_backward_end` is queued in the running backward
  size_t next_launch_ = 0;
  std::vector<std::pair<size_t, at::Tensor>> kept_grads_;  // of unused parameters, in view mode

  // Which parameters got a gradient on this rank since the last synchronised step; at the end of a step
  // that `tracks_use_`, the map says how many ranks used each.
  std::vector<char> used_;
  at::Tensor used_map_;
  c10::intrusive_ptr<c10d::Work> used_map_work_;

  // Static graph: how many gradients each parameter gets in one backward, and is still to get.
  std::vector<int> expected_hits_;
  std::vector<int> remaining_hits_;
  std::vector<char> globally_unused_;
};

}  // namespace commhooks
