// Averages gradients over ranks while backward is still computing others.
#pragma once

#include "reducer/arrivals.h"
#include "reducer/bucket.h"
#include "reducer/bucket_plan.h"
#include "reducer/lanes.h"
#include "reducer/recorder.h"
#include "reducer/static_graph.h"
#include "reducer/step_state.h"
#include "reducer/unused_parameters.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace commhooks {

// A shared or an intrusive pointer, depending on torch's version.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

struct ReducerOptions {
  std::vector<std::string> names;          // one per parameter
  std::vector<int64_t> keys;               // one per parameter; only equal ones share a bucket
  std::vector<char> sparse;                // one per parameter: whether its gradient is
  std::map<int64_t, GroupPtr> key_groups;  // of keys whose parameters are averaged elsewhere
  std::optional<int64_t> late_key;         // whose buckets are launched after all others
  BucketCaps caps;
  bool small_last_bucket = false;  // rebuilt buckets get their sizes from `caps` back to front
  bool find_unused_parameters = false;
  bool static_graph = false;
  bool gradient_as_bucket_view = false;
  bool stable_buckets = false;               // never rebuild into arrival order
  bool skip_unused_buckets = false;          // those that this forward does not use, on any rank
  bool release_buckets = false;              // give memory back between steps
  std::map<std::string, at::Tensor> frozen;  // parameters that required no gradient at first
};

// Where the time of a step went; the clock's epoch where unknown.
struct StepTimes {
  using Clock = Span::Clock;

  Clock::time_point backward_start;
  Clock::time_point backward_end;  // the last gradient
  Clock::time_point communication_start;
  Clock::time_point communication_end;
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
// several autograd threads (one per device) complete buckets at once; taken before `mutex_`. Recursive,
// as what a hook or an observer calls may end the step.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // Attaches to the gradient accumulators of `parameters`; the hooks vanish with the reducer.
  static std::shared_ptr<Reducer> create(
      std::vector<at::Tensor> parameters, ReducerOptions options, GroupPtr process_group);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // --- between steps ---

  // Announces that the next backward synchronizes. `outputs`: those of the forward, needed to find
  // unused parameters (`needs_outputs()`), else may be empty. `scale`: what gradients are multiplied
  // by before they are averaged. Throws if the previous backward left parameters without gradients.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs, double scale);
  bool needs_outputs() const {
    return options_.find_unused_parameters || options_.static_graph;
  }

  // Takes part in a step of the other ranks with gradients of zero, and leaves `.grad` as it is.
  // `skipped`: what `skipped_buckets()` is on those ranks.
  void shadow_backward(const std::vector<bool>& skipped);

  // For each bucket, whether this step leaves it out; see `skip_unused_buckets`.
  std::vector<bool> skipped_buckets() const;

  // After the first synchronized step: cuts the buckets anew, in the order in which rank 0 saw its
  // gradients arrive. Where parameters may be unused, as soon as rank 0 has seen the same order twice.
  // A collective call, to be made before forward. Returns whether it did.
  bool rebuild_buckets();
  bool has_rebuilt() const;

  void set_hook(std::shared_ptr<Hook> hook);
  std::string hook_name() const;

  // Cuts the buckets anew by other keys.
  void set_keys(std::vector<int64_t> keys);

  // Gradients of later steps arrive under this assumption; only before the first step.
  void set_static_graph();

  // Averages over another group from the next step on, by plain averaging, and forgets what it knows
  // of the graph.
  void set_process_group(GroupPtr process_group);
  const GroupPtr& process_group() const {
    return process_group_;
  }

  // Detaches from autograd: no later backward synchronizes.
  void remove_autograd_hooks();

  // Called with the indices of parameters whose gradients have been averaged and written back, bucket
  // by bucket, as soon as that is the case, on the thread that runs backward. Not called for
  // parameters that no rank used.
  using Observer = std::function<void(const std::vector<size_t>&)>;
  void set_observer(Observer observer);

  // The next backward's end waits for these as well.
  void await_after_backward(std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures);

  // Whether backward returns without waiting; `finalize_backward` then ends the step.
  void set_manual_finalization(bool manual);
  void finalize_backward();

  // Throws, naming the parameters, if a backward has left some without a gradient.
  void check_finalized();

  // Ends the current step, if there is one: waits for what the hook holds and forgets it.
  void abandon() noexcept;

  // --- observation ---

  struct BucketInfo {
    std::shared_ptr<const BucketLayout> layout;
    std::vector<size_t> indices;
    int64_t bytes;
    size_t lane;
    bool is_sparse;
    int64_t ranks;
    BucketStats stats;
  };
  std::vector<BucketInfo> buckets() const;
  void reset_stats();
  StepTimes last_times() const;

  // Notes when what happens, from now until `stop_recording`, which hands it out.
  void start_recording() {
    recorder_.start();
  }
  std::vector<Span> stop_recording() {
    return recorder_.stop();
  }

  // Synchronized backward passes so far; `GradBucket::step` of the next one. Set when training resumes.
  int64_t steps() const;
  void set_steps(int64_t steps);

 private:
  Reducer(std::vector<at::Tensor> parameters, ReducerOptions options, GroupPtr process_group);

  struct Location {
    size_t bucket;
    size_t position;
  };
  class BackwardGuard;

  void attach();
  void detach();
  void set_buckets(const std::vector<size_t>& order, bool back_to_front);

  // --- collecting: reducer_step.cpp ---

  void begin_step_locked(
      std::vector<size_t> unreachable, std::shared_ptr<const GradientStore> store);
  void skip_unused_locked(const std::vector<size_t>& unreachable);
  void on_backward_start();
  void on_gradient(size_t index);
  void queue_backward_end_locked();
  void mark_absent_locked();
  void arrive_locked(size_t index);
  void end_discovery_locked();
  void on_backward_end();
  void end_step_locked();

  // --- buckets on their way to the hooks and back: reducer_exchange.cpp ---

  void launch_ready_buckets();
  void launch(size_t bucket_index);
  at::Tensor pack(Bucket& bucket);
  void finish_ready_buckets();
  void finish(Bucket& bucket);
  at::Tensor await(Bucket& bucket);
  void write_back(Bucket& bucket, const at::Tensor& average);
  void unpack(Bucket& bucket, const at::Tensor& average, const std::vector<size_t>& positions);
  void drain();
  void drain_buckets();
  void finish_unused();
  PackFormat format_of(const Bucket& bucket) const;

  // --- errors ---

  void check_complete(const char* advice);
  void check_frozen() const;
  std::string describe(const std::vector<size_t>& indices) const;
  std::string rank_prefix() const;

  bool dynamic_graph_locked() const {
    return options_.find_unused_parameters && !options_.static_graph;
  }
  // See Note [Static graph].
  bool discovering_locked() const {
    return options_.static_graph && !graph_.is_known();
  }
  // In this step.
  bool any_gradient_locked() const {
    return arrivals_.any() || graph_.has_watched();
  }
  bool tracks_use_locked() const {
    return dynamic_graph_locked() || discovering_locked();
  }

  const std::vector<at::Tensor> parameters_;
  ReducerOptions options_;
  GroupPtr process_group_;
  std::vector<std::pair<uintptr_t, NodePtr>> accumulators_;  // with the key of our hook in each
  // Where buckets are finished while backward goes on; nothing on the CPU. See Note [Streams].
  std::optional<c10::Stream> aside_;

  mutable std::mutex mutex_;
  std::recursive_mutex launch_mutex_;

  Lanes lanes_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  std::vector<Location> locations_;  // of each parameter
  std::vector<size_t> order_;        // of parameters, from which the buckets were cut
  bool back_to_front_ = false;       // whether they were cut from their end
  bool rebuilt_ = false;
  int64_t next_rebuild_ = 1;  // how many steps have to be completed before the next attempt
  int64_t completed_ = 0;     // synchronized backward passes since the last change of group
  int64_t first_step_ = 0;    // and those that came before it
  Observer observer_;
  bool manual_finalization_ = false;
  Recorder recorder_;

  StaticGraph graph_;  // what is known of it, under `static_graph`
  UnusedParameters unused_;
  Arrivals arrivals_;

  // --- of the current step ---
  StepState state_;
  double scale_ = 1.0;
  // Where gradients live; see `shadow_backward` and gradient.h.
  std::shared_ptr<const GradientStore> store_ = local_gradients();
  Names left_out_;              // parameters of buckets that are skipped
  std::vector<size_t> absent_;  // parameters that will get no gradient, until they count as arrived
  bool end_queued_ = false;     // `on_backward_end` is queued in the running backward
  size_t next_launch_ = 0;
  size_t next_finish_ = 0;
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> awaited_;
  StepTimes times_;
  StepTimes last_times_;
};

}  // namespace commhooks
