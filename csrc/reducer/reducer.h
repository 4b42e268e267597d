// Averages gradients over ranks while backward is still computing others.
#pragma once

#include "reducer/arrivals.h"
#include "reducer/bucket.h"
#include "reducer/bucket_plan.h"
#include "reducer/bucket_set.h"
#include "reducer/recorder.h"
#include "reducer/reduction_groups.h"
#include "reducer/static_graph.h"
#include "reducer/step.h"
#include "reducer/step_state.h"
#include "reducer/turn.h"
#include "reducer/unused_parameters.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <map>
#include <memory>
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
  std::vector<char> sparse;                // one per parameter: whether its gradient is sparse
  std::map<int64_t, GroupPtr> key_groups;  // process groups of keys that are averaged elsewhere
  std::optional<int64_t> late_key;         // buckets with this key are launched after all others
  BucketCaps caps;
  bool small_last_bucket = false;  // rebuilt buckets get their sizes from `caps` back to front
  bool find_unused_parameters = false;
  bool static_graph = false;
  bool gradient_as_bucket_view = false;
  bool stable_buckets = false;       // never rebuild into arrival order
  bool skip_unused_buckets = false;  // skip buckets that no rank uses in this forward
  bool release_buckets = false;      // free memory between steps
};

// Note [How a gradient travels]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
//   1. `prepare_for_backward` (from forward): Idle -> Collecting.
//   2. Autograd accumulates a parameter's gradient and calls `on_gradient`, which counts down the
//      parameter's bucket.
//   3. `launch_ready_buckets`: each complete bucket is packed and handed to the hook after all
//      buckets before it, on the thread that runs backward. The order of launches is therefore the
//      same on all ranks, even if the order of gradients is not.
//   4. `on_backward_end` (an autograd callback, queued by the first gradient of each backward):
//      once the hook has all buckets, Collecting -> Draining; wait for each bucket in order and
//      write its average back; Draining -> Idle.
//
// `mutex_` guards the bookkeeping, as Note [Locks and the GIL] says. Buckets belong to the thread
// that has the turn, see Note [The turn]. Settings and buckets change between two steps only; the
// methods for observation and `abandon` may be called by any thread at any time.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // Attaches hooks to the gradient accumulators of `parameters`, and removes them on destruction.
  static std::shared_ptr<Reducer> create(
      std::vector<at::Tensor> parameters, ReducerOptions options, GroupPtr process_group);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // --- between steps ---

  // Announces that the next backward synchronizes. `outputs`: the outputs of forward if
  // `needs_outputs()`, to find unused parameters; otherwise it may be empty. `scale`: gradients are
  // multiplied by it before they are averaged. Throws if the previous backward left parameters
  // without gradients.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs, double scale);
  bool needs_outputs() const {
    return options_.find_unused_parameters || options_.static_graph;
  }

  // Takes part in a step of the other ranks with gradients of zero, and does not change `.grad`.
  // `skipped`: the result of `skipped_buckets()` on those ranks.
  void match_backward(const std::vector<bool>& skipped);

  // Returns for each bucket whether this step skips it; see `skip_unused_buckets`.
  std::vector<bool> skipped_buckets() const;

  // Rebuilds the buckets after the first synchronized step, in the order in which gradients arrived
  // on rank 0. If parameters may be unused, waits until all ranks have used the same parameters in
  // the same order twice: the order of one rank may be wrong for a rank with another graph. A
  // collective call, to be made before forward. Returns whether buckets were rebuilt.
  bool rebuild_buckets();
  bool has_rebuilt() const;

  void set_hook(std::shared_ptr<Hook> hook);
  std::string hook_name() const;

  // Rebuilds the buckets with other keys.
  void set_keys(std::vector<int64_t> keys);

  // Assumes a static graph in later steps; may only be called before the first step.
  void set_static_graph();

  // Averages over another group from the next step on, with the hook that averages. Forgets what it
  // has learned about the graph.
  void set_process_group(GroupPtr process_group);
  GroupPtr process_group() const;

  // Whether autograd still calls the reducer for each parameter. It makes a new accumulator,
  // without the hook, for a parameter whose data got another dtype or device, even if it is changed
  // back.
  bool is_attached() const;
  // Attaches to these new accumulators.
  void reattach();
  // Detaches from autograd: later backwards do not synchronize.
  void remove_autograd_hooks();

  // Does not warn of gradients that no bucket takes until the next `prepare_for_backward`.
  void expect_local_gradients();

  // Called on the thread that runs backward, bucket by bucket, as soon as gradients have been
  // averaged and written back, with the indices of their parameters. Not called for parameters that
  // no rank used.
  using Observer = std::function<void(const std::vector<size_t>&)>;
  void set_observer(Observer observer);

  // The end of the next backward also waits for these futures.
  void await_after_backward(std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures);

  // Whether backward returns without waiting for the averages; `finalize_backward` then ends the
  // step.
  void set_manual_finalization(bool manual);
  void finalize_backward();

  // Throws, naming the parameters, if a backward has left some without a gradient.
  void check_finalized();

  // Ends the current step, if there is one: waits for buckets that the hook has, and drops them.
  void abandon() noexcept;

  // --- observation ---

  struct BucketInfo {
    std::shared_ptr<const BucketLayout> layout;
    std::vector<size_t> indices;
    int64_t bytes;
    size_t group;  // index of the reduction group
    bool is_sparse;
    int64_t ranks;
    BucketStats stats;
  };
  std::vector<BucketInfo> buckets() const;
  void reset_stats();
  StepTimes last_times() const;

  Arrivals::Use last_use() const;

  // The text of the last error, for the logging data; empty if there was none.
  std::string last_error() const;
  void set_last_error(std::string text);

  // Records when each activity happens, until `stop_recording`, which returns the records.
  void start_recording() {
    recorder_.start();
  }
  std::vector<Span> stop_recording() {
    return recorder_.stop();
  }

  // Number of synchronized backward passes so far, which is `GradBucket::step` of the next one. Set
  // it when training resumes.
  int64_t steps() const;
  void set_steps(int64_t steps);

 private:
  Reducer(std::vector<at::Tensor> parameters, ReducerOptions options, GroupPtr process_group);

  using Accumulator = std::pair<uintptr_t, NodePtr>;  // with the key of the hook
  using Accumulators = std::vector<Accumulator>;
  class BackwardGuard;
  struct Launch;

  void attach();
  Accumulator with_hook(size_t index, NodePtr accumulator);
  static void detach(const Accumulators& accumulators);
  // Waits until no other thread works on the buckets of a step.
  void wait_for_turn_locked(Lock& lock);

  std::vector<int64_t> encoded_order_locked() const;
  bool agree_on_order(at::Tensor& order, bool unanimously) const;

  // --- collecting: reducer_step.cpp ---

  // Runs a part of a backward, and keeps the text of its exception.
  template <typename Part>
  void in_backward(Part part) {
    try {
      part();
    } catch (const std::exception& error) {
      set_last_error(error.what());
      throw;
    }
  }

  // `step.absent`: parameters that the graph does not reach.
  void begin_step_locked(Lock& lock, Step step);
  void skip_unused_locked();
  void on_backward_start();
  void on_gradient(size_t index);
  struct Gradient;
  Gradient note_gradient(size_t index, Turn::Helper& helper);
  bool pack_early(size_t index, const PackFormat& format, Turn::Helper& helper);
  // Returns whether `queue_backward_end` is to be called once the lock is released.
  bool begin_backward_locked(Lock& lock);
  bool is_left_out_locked() const;
  void warn_of_left_out(size_t index);
  void queue_backward_end();
  bool is_last_gradient_locked(size_t index);
  bool packs_early_locked(size_t index) const;
  Bucket& bucket_of(size_t index) const;  // requires the lock, or a part in the step
  void mark_absent_locked();
  void note_arrival_locked(size_t index, bool used = true);
  void count_down_locked(size_t index);
  void end_discovery_locked();
  void on_backward_end();

  // --- buckets on their way to the hooks and back: reducer_exchange.cpp ---

  void launch_ready_buckets();
  bool launch_or_finish_next(Turn::Holder& turn);
  bool has_ready_bucket_locked() const;
  std::optional<Launch> next_launch_locked();
  void launch(const Launch& launch);
  std::shared_ptr<GradBucket> pack(const Launch& launch);
  bool has_ended() const;
  Bucket* next_completed_locked();
  void finish_early(Bucket& bucket);
  void finish(Bucket& bucket);
  at::Tensor await(Bucket& bucket);
  void write_back(Bucket& bucket, const at::Tensor& average);
  void unpack(Bucket& bucket, const at::Tensor& average, const std::vector<size_t>& positions);
  void drain();
  void drain_buckets();
  void finish_unused();
  void wait_for_awaited();
  void check_draining_locked() const;
  void count_step_locked();
  void clear_step() noexcept;
  PackFormat format_of(const Bucket& bucket) const;
  std::string describe_average(const Bucket& bucket) const;

  // --- failures: reducer_failure.cpp ---

  void drop_buckets() noexcept;
  void check_complete(const char* advice);
  std::string explain_missing(const std::vector<size_t>& missing) const;
  std::string describe(const std::vector<size_t>& indices) const;
  static std::string describe_use_exchange();
  std::string rank_prefix() const;

  bool dynamic_graph_locked() const {
    return options_.find_unused_parameters && !options_.static_graph;
  }
  // See Note [Static graph].
  bool discovering_locked() const {
    return options_.static_graph && !graph_.is_known();
  }
  // Whether any gradient has arrived in this step.
  bool any_gradient_locked() const {
    return arrivals_.any() || graph_.has_watched();
  }
  bool tracks_use_locked() const {
    return dynamic_graph_locked() || discovering_locked();
  }

  const std::vector<at::Tensor> parameters_;
  ReducerOptions options_;
  GroupPtr process_group_;
  int rank_;
  Accumulators accumulators_;
  // Buckets are finished on it while backward goes on; none on the CPU. See Note [Streams].
  std::optional<c10::Stream> side_stream_;

  mutable std::mutex mutex_;
  Turn turn_;

  ReductionGroups groups_;
  BucketSet buckets_;
  bool rebuilt_ = false;
  int64_t next_rebuild_ = 1;  // number of completed steps before the next attempt to rebuild
  int64_t completed_ = 0;     // synchronized backward passes since the last change of group
  int64_t first_step_ = 0;    // number of steps before those
  std::shared_ptr<const Observer> observer_;  // null if there is none
  bool manual_finalization_ = false;
  Recorder recorder_;
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> awaited_;  // by the next end of a step
  bool is_dropping_ = false;  // whether a thread drops the buckets of a failed step
  bool end_queued_ = false;   // whether `on_backward_end` is queued in the running backward
  bool expects_local_gradients_ = false;  // see `warn_of_left_out`
  bool has_warned_ = false;
  StepTimes last_times_;
  std::string last_error_;

  StaticGraph graph_;  // with `static_graph`
  UnusedParameters unused_;
  Arrivals arrivals_;

  StepState state_;
  Step step_;
};

}  // namespace commhooks
