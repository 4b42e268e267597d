// Carries the buckets of a step to the hooks, and their averages back into the gradients.
#pragma once

#include "reducer/bucket_set.h"
#include "reducer/gradient_tracker.h"
#include "reducer/options.h"
#include "reducer/recorder.h"
#include "reducer/reduction_groups.h"
#include "reducer/step.h"
#include "reducer/turn.h"
#include "reducer/unused_parameters.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace commhooks {

// Owns the turn, the phase of the step, the buckets and the hooks. `..._locked` methods are called
// with the lock that `lock()` returns; all others take it themselves, by Note [Locks and the GIL].
class BucketPipeline {
 public:
  // Keeps references to the first three arguments, of the reducer that owns the pipeline.
  BucketPipeline(
      const std::vector<at::Tensor>& parameters,
      const ReducerOptions& options,
      GradientTracker& tracker,
      const GroupPtr& process_group,
      TransportPtr transport);

  Turn& turn() {
    return turn_;
  }
  Lock lock() const {
    return Lock(turn_.mutex);
  }

  // --- between steps ---

  void set_hook(std::shared_ptr<Hook> hook);
  std::string hook_name() const;

  // Called on the thread that runs backward, bucket by bucket, as soon as gradients have been
  // averaged and written back, with the indices of their parameters. Not called for parameters that
  // no rank used.
  using Observer = std::function<void(const std::vector<size_t>&)>;
  void set_observer(Observer observer);

  // Whether backward returns without waiting for the averages; `finalize_backward` then ends the
  // step.
  void set_manual_finalization(bool manual);

  // The end of the next backward also waits for these futures.
  void await_after_backward(std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures);

  // These change between two steps only, or under the lock.
  const ReductionGroups& groups() const {
    return groups_;
  }
  const BucketSet& buckets() const {
    return buckets_;
  }
  // Waits until no other thread works on the buckets of a step.
  void wait_for_turn_locked(Lock& lock);
  void replace_buckets_locked(Lock& lock, BucketSet buckets);
  // Averages over other process groups, with the hook that averages.
  void replace_groups_locked(Lock& lock, ReductionGroups groups, BucketSet buckets);

  // --- collecting gradients ---

  Phase phase_locked() const {
    return phase_;
  }
  // Idle or Collecting -> Collecting. `absent`: parameters that will get no gradient.
  void begin_step_locked(Lock& lock, Step step, std::vector<size_t> absent);
  const Step& step_locked() const {
    return step_;
  }
  // Returns whether a backward begins: whether the last one has ended.
  bool begin_backward_locked(Lock& lock);
  // Also outside a step: parameters that `no_sync` used count as used at the next synchronization.
  void note_use_locked(size_t index);
  // Notes a gradient that has arrived on the current stream.
  void note_gradient_locked(size_t index);
  // Adds the last gradient of a parameter: returns the format to `pack_early` in, or counts down.
  std::optional<PackFormat> add_gradient_locked(size_t index, Turn::Hold& helper);
  // Returns whether a bucket is ready.
  bool pack_early(size_t index, const PackFormat& format, Turn::Hold& helper);
  // One gradient less is missing in the bucket of this parameter.
  void count_down_locked(size_t index);
  void end_backward_locked();

  bool has_ready_bucket_locked() const;
  void launch_ready_buckets();
  // Once the hook has all buckets: Collecting -> Draining and, unless finalization is manual,
  // `finalize_backward`.
  void end_collecting();

  // --- ending the step ---

  // Runs a part of the step, which fails with it.
  template <typename Function>
  void or_abort(Function function) {
    try {
      function();
    } catch (...) {
      abort();
      throw;
    }
  }
  // Waits for all buckets, and writes their averages back: Draining -> Idle.
  void finalize_backward();
  // Aborts the step, if there is one, from any thread: Note [Abort, drain, close].
  void abort() noexcept;

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
  std::vector<BucketInfo> bucket_infos() const;
  void reset_stats();
  // Returns for each bucket whether this step skips it; see `skip_unused_buckets`.
  std::vector<bool> skipped_buckets() const;
  StepTimes last_times() const {
    const Lock lock = this->lock();
    return last_times_;
  }
  GroupPtr process_group() const {
    const Lock lock = this->lock();
    return default_group();
  }
  // Null if there is none.
  TransportPtr transport() const {
    const Lock lock = this->lock();
    return groups_.of_users().transport();
  }

  // Number of synchronized backward passes so far, which is `GradBucket::step` of the next one. Set
  // it when training resumes.
  int64_t steps() const {
    const Lock lock = this->lock();
    return first_step_ + completed_;
  }
  void set_steps(int64_t steps);
  // The same since the last change of process groups.
  int64_t completed_locked() const {
    return completed_;
  }

  // Records when each activity happens.
  Recorder& recorder() {
    return recorder_;
  }

 private:
  struct Launch;

  void skip_locked(const std::vector<size_t>& absent);
  bool tracks_use_locked() const {
    return options_.graph_may_change() || tracker_.is_learning();
  }
  Bucket& bucket_of(size_t index) const;  // requires the lock, or a part in the step
  PackFormat format_of(const Bucket& bucket) const;

  std::optional<Launch> next_launch_locked();
  void launch(const Launch& launch);
  std::shared_ptr<GradBucket> pack(const Launch& launch);

  Bucket* next_completed_locked();
  void finish(Bucket& bucket);
  at::Tensor await(Bucket& bucket);
  void write_back(Bucket& bucket, const at::Tensor& average);
  void unpack(Bucket& bucket, const at::Tensor& average, const std::vector<size_t>& positions);
  std::string describe_average(const Bucket& bucket) const;

  void start_sharing();
  void drain();
  void drain_buckets();
  void finish_unused();
  void wait_for_awaited();
  void check_draining_locked() const;
  void count_step_locked();
  void clear_step() noexcept;

  const GroupPtr& default_group() const {
    return groups_.process_groups().front();
  }

  const std::vector<at::Tensor>& parameters_;
  const ReducerOptions& options_;
  GradientTracker& tracker_;
  // Buckets are finished on it while backward goes on; none on the CPU. See Note [Streams].
  const std::optional<c10::Stream> side_stream_;

  Turn turn_;
  bool is_aborting_ = false;  // whether a thread clears a step that has failed

  ReductionGroups groups_;
  BucketSet buckets_;
  Phase phase_ = Phase::Idle;
  Step step_;
  UnusedParameters unused_;
  int64_t completed_ = 0;   // synchronized backward passes since the last change of groups
  int64_t first_step_ = 0;  // number of steps before those
  bool manual_finalization_ = false;
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> awaited_;  // by the next end of a step
  std::shared_ptr<const Observer> observer_;                      // null if there is none
  StepTimes last_times_;
  Recorder recorder_;
};

}  // namespace commhooks
