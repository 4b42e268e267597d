// Averages gradients over ranks while backward is still computing others.
#pragma once

#include "reducer/bucket_pipeline.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace commhooks {

// A shared or an intrusive pointer, depending on torch's version.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

// Note [How a gradient travels]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
//   1. `begin_step` (from forward): Idle -> Collecting.
//   2. Autograd accumulates a parameter's gradient and calls `on_gradient`, which counts down the
//      parameter's bucket.
//   3. `launch_ready_buckets`: each complete bucket is packed and handed to the hook after all
//      buckets before it, on the thread that runs backward. The order of launches is therefore the
//      same on all ranks, even if the order of gradients is not.
//   4. `on_backward_end` (an autograd callback, queued by the first gradient of each backward):
//      once the hook has all buckets, Collecting -> Draining; wait for each bucket in order and
//      write its average back; Draining -> Idle.
//
// Three objects share the work, and know only what is below them:
//   * Reducer listens to autograd, and changes settings between two steps;
//   * BucketPipeline carries buckets to the hooks and back;
//   * GradientTracker knows which gradients have arrived.
// The mutex of the turn guards the bookkeeping, as Note [Locks and the GIL] says. Buckets belong to
// the thread that has the turn, see Note [The turn]. Settings and buckets change between two steps
// only; the methods for observation and `abort` may be called by any thread at any time.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // Attaches hooks to the gradient accumulators of `parameters`, and removes them on destruction.
  // `transport`: between the ranks of `process_group`; may be null.
  static std::shared_ptr<Reducer> create(
      std::vector<at::Tensor> parameters,
      ReducerOptions options,
      GroupPtr process_group,
      TransportPtr transport);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // The hook, the steps and what they cost.
  BucketPipeline& pipeline() {
    return pipeline_;
  }

  // --- between steps ---

  // Announces that the next backward synchronizes. `outputs`: the outputs of forward, to find
  // unused parameters, and to tell its backward from local ones: see `expect_local_gradients`.
  // `scale`: gradients are multiplied by it before they are averaged. Throws, naming the
  // parameters, if the previous backward left some without gradients; the reducer is usable
  // afterwards.
  void begin_step(const std::vector<at::Tensor>& outputs, double scale);
  bool needs_outputs() const {
    return options_.allows_unused();
  }
  // Whether no gradient has come of the backward that `begin_step` has announced.
  bool awaits_backward() const {
    const Lock lock = pipeline_.lock();
    return awaits_backward_locked();
  }

  // Takes part in a step of the other ranks with gradients of zero, and does not change `.grad`.
  // `skipped`: the result of `skipped_buckets()` on those ranks.
  void match_backward(const std::vector<bool>& skipped);

  // Rebuilds the buckets after the first synchronized step, in the order in which gradients arrived
  // on rank 0. If parameters may be unused, waits until all ranks have used the same parameters in
  // the same order twice: the order of one rank may be wrong for a rank with another graph. A
  // collective call, to be made before forward. Returns whether buckets were rebuilt.
  bool rebuild_buckets();
  bool has_rebuilt() const {
    const Lock lock = pipeline_.lock();
    return rebuilt_;
  }

  // Rebuilds the buckets so that only parameters with equal keys share one. On all ranks.
  void set_keys(std::vector<int64_t> keys);

  // Assumes a static graph in later steps; may only be called before the first step.
  void set_static_graph();

  // Averages over another group from the next step on, with the hook that averages. Forgets what it
  // has learned about the graph.
  void set_process_group(const GroupPtr& process_group, TransportPtr transport);

  // Whether autograd still calls the reducer for each parameter. It makes a new accumulator,
  // without the hook, for a parameter whose data got another dtype or device, even if it is changed
  // back.
  bool is_attached() const;
  // Attaches to these new accumulators.
  void reattach();
  // Detaches from autograd: later backwards do not synchronize.
  void remove_autograd_hooks();

  // Does not warn of gradients that no bucket takes until the next `begin_step`. If that was
  // before, gradients are local until one reaches an output of the forward that it has announced.
  void expect_local_gradients() {
    const Lock lock = pipeline_.lock();
    tracker_.expect_local();
  }

  // Throws, naming the parameters, if a backward has left some without a gradient.
  void check_finalized();

  // --- observation ---

  GradientTracker::Use last_use() const {
    const Lock lock = pipeline_.lock();
    return tracker_.last_use();
  }

  // The text of the last error, for the logging data; empty if there was none. Errors in a backward
  // set it.
  std::string last_error() const {
    const Lock lock = pipeline_.lock();
    return last_error_;
  }
  void set_last_error(std::string text) {
    const Lock lock = pipeline_.lock();
    last_error_ = std::move(text);
  }

 private:
  Reducer(
      std::vector<at::Tensor> parameters,
      ReducerOptions options,
      const GroupPtr& process_group,
      TransportPtr transport);

  using Accumulator = std::pair<uintptr_t, NodePtr>;  // with the key of the hook
  using Accumulators = std::vector<Accumulator>;

  void attach();
  Accumulator with_hook(size_t index, NodePtr accumulator);
  static void detach(const Accumulators& accumulators);

  // Runs a part of a backward, and keeps the text of its exception.
  template <typename Function>
  void in_backward(Function function) {
    try {
      function();
    } catch (const std::exception& error) {
      set_last_error(error.what());
      throw;
    }
  }

  bool is_collecting_locked() const {
    return pipeline_.phase_locked() == Phase::Collecting;
  }
  bool awaits_backward_locked() const {
    return is_collecting_locked() && !tracker_.any();
  }
  bool is_learning() const {
    const Lock lock = pipeline_.lock();
    return tracker_.is_learning();
  }
  bool is_local_locked() const {
    return !is_collecting_locked() ||
        (!tracker_.any() && tracker_.expects_local() && outputs_have_graph_ &&
         !backward_reached_outputs_);
  }
  void on_backward_start(int64_t announcement);
  void on_gradient(size_t index);
  void mark_absent_locked();
  bool is_last_gradient_locked(size_t index);
  void note_arrival_locked(size_t index, bool used = true);
  void queue_backward_end();
  void on_backward_end();

  void warn_of_unannounced(size_t index);
  void check_complete(const char* advice);
  std::string rank_prefix() const {
    return pipeline_.groups().rank_prefix();
  }

  bool agree_on_order(at::Tensor& order, bool unanimously) const;
  void wait_to_rebuild_locked();

  const std::vector<at::Tensor> parameters_;
  ReducerOptions options_;
  GradientTracker tracker_;
  BucketPipeline pipeline_;
  Accumulators accumulators_;
  int64_t announcements_ = 0;
  // Of the forward that was announced last: autograd has computed all outputs with gradients. That
  // of a parameter or an input could come before a backward is seen at any output.
  bool outputs_have_graph_ = false;
  // A backward is at one of these outputs; only recorded if gradients may be of a local step.
  bool backward_reached_outputs_ = false;
  // The graph of these outputs is known to contain no parameter.
  bool reaches_no_parameter_ = false;
  bool rebuilt_ = false;
  int64_t next_rebuild_ = 1;  // number of completed steps before the next attempt to rebuild
  bool has_warned_ = false;   // see `warn_of_unannounced`
  std::string last_error_;
};

}  // namespace commhooks
