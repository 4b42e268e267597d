#include "reducer/bucket_pipeline.h"

#include "reducer/peers.h"
#include "reducer/thread_state.h"

#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <numeric>

namespace commhooks {
namespace {

using Clock = Span::Clock;

double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

std::string describe_sharing() {
  return "the exchange of which parameters each rank used";
}

// Gradients arrive in about the reverse of the order in which parameters were registered.
std::vector<size_t> reverse_order(size_t parameters) {
  std::vector<size_t> order(parameters);
  std::iota(order.rbegin(), order.rend(), 0);
  return order;
}

}  // namespace

BucketPipeline::BucketPipeline(
    const std::vector<at::Tensor>& parameters,
    const ReducerOptions& options,
    GradientTracker& tracker,
    const GroupPtr& process_group,
    TransportPtr transport)
    : parameters_(parameters),
      options_(options),
      tracker_(tracker),
      side_stream_(side_stream(parameters.front().device())),
      groups_(process_group, options.key_groups, std::move(transport)),
      buckets_(make_buckets(parameters, options, groups_, reverse_order(parameters.size()))),
      unused_(parameters.size()) {}

// --------------------------------------------------------------------------------- between steps

void BucketPipeline::set_hook(std::shared_ptr<Hook> hook) {
  hook->use_transport(process_group(), transport());
  const PackFormat format = hook->format();
  const bool passes_through = hook->passes_through();
  Lock lock(turn_.mutex);
  TORCH_CHECK(
      phase_ == Phase::Idle || !tracker_.any(), groups_.rank_prefix(),
      "The hook can only be changed between two steps, and a backward is under way.");
  ReductionGroup& group = groups_.of_users();
  lock.replace(group.hook, std::move(hook));
  group.format = format;
  group.passes_through = passes_through;
}

std::string BucketPipeline::hook_name() const {
  std::shared_ptr<Hook> hook;
  {
    const Lock lock(turn_.mutex);
    hook = groups_.of_users().hook;
  }
  return hook->name();
}

void BucketPipeline::set_observer(Observer observer) {
  auto shared = observer ? std::make_shared<const Observer>(std::move(observer)) : nullptr;
  Lock lock(turn_.mutex);
  lock.replace(observer_, std::move(shared));
}

void BucketPipeline::set_manual_finalization(bool manual) {
  const Lock lock(turn_.mutex);
  manual_finalization_ = manual;
}

void BucketPipeline::await_after_backward(
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures) {
  const Lock lock(turn_.mutex);
  std::move(futures.begin(), futures.end(), std::back_inserter(awaited_));
}

void BucketPipeline::wait_for_turn_locked(Lock& lock) {
  lock.wait(turn_.changed, [&] {
    return turn_.is_mine() || (turn_.is_open() && !turn_.has_helpers() && phase_ != Phase::Failed);
  });
}

void BucketPipeline::replace_buckets_locked(Lock& lock, BucketSet buckets) {
  lock.replace(buckets_, std::move(buckets));
}

void BucketPipeline::replace_groups_locked(Lock& lock, ReductionGroups groups, BucketSet buckets) {
  replace_buckets_locked(lock, std::move(buckets));
  lock.replace(groups_, std::move(groups));
  first_step_ += completed_;
  completed_ = 0;
  unused_.forget_graph();
}

// -------------------------------------------------------------------------- collecting gradients

void BucketPipeline::begin_step_locked(Lock& lock, Step step, std::vector<size_t> absent) {
  wait_for_turn_locked(lock);
  TORCH_CHECK(
      phase_ == Phase::Idle || phase_ == Phase::Collecting,
      "The last backward has not been finished: with manual finalization, call "
      "finalize_backward() after each backward.");
  phase_ = Phase::Collecting;
  lock.replace(step_, std::move(step));
  unused_.begin_step(tracks_use_locked());
  groups_.begin_step();
  for (auto& bucket : buckets_.all) {
    bucket->begin_step();
    bucket->set_store(step_.store);
  }
  if (options_.skip_unused_buckets) {
    skip_locked(absent);
  }
  for (const auto& bucket : buckets_.all) {
    groups_[bucket->group].buckets += bucket->progress.skipped ? 0 : 1;
  }
  tracker_.begin_step(std::move(absent));
}

// Skips buckets all of whose parameters are absent.
void BucketPipeline::skip_locked(const std::vector<size_t>& absent) {
  std::vector<size_t> absent_in(buckets_.all.size(), 0);
  for (const size_t index : absent) {
    ++absent_in[buckets_.locations[index].bucket];
  }
  std::vector<std::string> left_out;
  for (auto& bucket : buckets_.all) {
    bucket->progress.skipped = absent_in[bucket->index] == bucket->indices().size();
    if (bucket->progress.skipped) {
      const auto& names = bucket->layout().names;
      left_out.insert(left_out.end(), names.begin(), names.end());
    }
  }
  step_.left_out = std::make_shared<const std::vector<std::string>>(std::move(left_out));
}

bool BucketPipeline::begin_backward_locked(Lock& lock) {
  if (!tracker_.begin_backward()) {
    return false;
  }
  step_.times.backward_start = Clock::now();
  if (auto store = GradientStore::current(); store != step_.store) {
    lock.replace(step_.store, std::move(store));
    for (auto& bucket : buckets_.all) {
      bucket->set_store(step_.store);
    }
  }
  return true;
}

void BucketPipeline::note_use_locked(size_t index) {
  if (tracks_use_locked() && step_.store.has(parameters_[index])) {
    unused_.add_use(index);
  }
}

void BucketPipeline::note_gradient_locked(size_t index) {
  if (recorder_.is_on()) {
    const auto now = Clock::now();
    recorder_.add({Activity::Gradient, index, now, now});
  }
  bucket_of(index).add_stream();
}

std::optional<PackFormat> BucketPipeline::add_gradient_locked(size_t index, Turn::Hold& helper) {
  Bucket& bucket = bucket_of(index);
  if (bucket.can_pack_early() && !bucket.progress.is_packed &&
      !groups_[bucket.group].passes_through && !unused_.may_include(index)) {
    bucket.progress.is_packed = true;
    helper.help();
    return format_of(bucket);
  }
  count_down_locked(index);
  return std::nullopt;
}

bool BucketPipeline::pack_early(size_t index, const PackFormat& format, Turn::Hold& helper) {
  Bucket& bucket = bucket_of(index);
  {
    const Recorder::Scope packing(recorder_, Activity::Pack, bucket.index);
    bucket.pack_early(format, buckets_.locations[index].position);
  }
  const Lock lock(turn_.mutex);
  bucket.progress.is_packed = false;
  count_down_locked(index);
  helper.end();
  return has_ready_bucket_locked();
}

void BucketPipeline::count_down_locked(size_t index) {
  --bucket_of(index).progress.missing;
}

void BucketPipeline::end_backward_locked() {
  step_.times.backward_end = Clock::now();
  if (step_.times.backward_start != Clock::time_point()) {
    const auto step = static_cast<size_t>(first_step_ + completed_);
    recorder_.add({Activity::Backward, step, step_.times.backward_start, step_.times.backward_end});
  }
}

Bucket& BucketPipeline::bucket_of(size_t index) const {
  return *buckets_.all[buckets_.locations[index].bucket];
}

void BucketPipeline::end_collecting() {
  Turn::Hold turn(turn_);
  bool waits = true;
  {
    Lock lock(turn_.mutex);
    lock.wait(turn_.changed, [&] { return turn_.is_open() || phase_ != Phase::Collecting; });
    if (phase_ != Phase::Collecting || step_.next_launch < buckets_.all.size()) {
      // Another backward may bring the rest; otherwise the next forward raises an error.
      return;
    }
    turn.take();
    phase_ = Phase::Draining;
    waits = !manual_finalization_;
  }
  if (unused_.shares_use() && !groups_.of_users().hook->fails_everywhere()) {
    or_abort([&] { start_sharing(); });
  }
  if (waits) {
    finalize_backward();
  }
}

void BucketPipeline::start_sharing() {
  with_peers(default_group(), describe_sharing, [&] {
    unused_.start_sharing(
        groups_.process_groups(), tracker_.expected(), parameters_.front().device());
  });
}

// -------------------------------------------------------------------------------- to the hooks

// A copy of what a launch needs from the step: it is read under the lock, and the hook, which is
// called without it, may end the step.
struct BucketPipeline::Launch {
  Bucket* bucket;
  std::shared_ptr<Hook> hook;
  GroupPtr process_group;
  PackFormat format;
  GradientStore store;
  size_t index;  // among the buckets of the hook
  bool is_last;
  int64_t step;
  Names left_out;
};

PackFormat BucketPipeline::format_of(const Bucket& bucket) const {
  PackFormat format = groups_[bucket.group].format;
  format.scale *= step_.scale;
  return format;
}

// Until there is nothing to do, or another thread has the turn.
void BucketPipeline::launch_ready_buckets() {
  Turn::Hold turn(turn_);
  or_abort([&] {
    while (true) {
      std::optional<Launch> next;
      Bucket* completed = nullptr;
      {
        const Lock lock(turn_.mutex);
        if (!turn_.is_open()) {
          return;
        }
        turn.take();
        next = next_launch_locked();
        completed = next ? nullptr : next_completed_locked();
        if (!next && !completed) {
          turn.end();
          return;
        }
      }
      if (next) {
        launch(*next);
      } else {
        // On a stream of its own, while backward goes on.
        c10::OptionalStreamGuard stream;
        if (side_stream_) {
          stream.reset_stream(*side_stream_);
        }
        completed->enter_stream();
        finish(*completed);
      }
    }
  });
}

bool BucketPipeline::has_ready_bucket_locked() const {
  return phase_ == Phase::Collecting && step_.next_launch < buckets_.all.size() &&
      buckets_.all[step_.next_launch]->progress.missing == 0;
}

std::optional<BucketPipeline::Launch> BucketPipeline::next_launch_locked() {
  while (has_ready_bucket_locked()) {
    Bucket& bucket = *buckets_.all[step_.next_launch++];
    ReductionGroup& group = groups_[bucket.group];
    if (!bucket.progress.skipped && !group.passes_through) {
      const size_t index = group.launched++;
      return Launch{
          .bucket = &bucket,
          .hook = group.hook,
          .process_group = group.process_group,
          .format = format_of(bucket),
          .store = step_.store,
          .index = index,
          .is_last = index + 1 == group.buckets,
          .step = first_step_ + completed_,
          .left_out = step_.left_out};
    }
  }
  return std::nullopt;
}

void BucketPipeline::launch(const Launch& launch) {
  Bucket& bucket = *launch.bucket;
  at::RecordFunction range(at::RecordScope::FUNCTION);
  if (range.isActive()) {
    range.before(c10::str("commhooks: ", launch.hook->name(), ", bucket ", bucket.index));
  }
  bucket.enter_stream();
  if (options_.gradient_as_bucket_view && options_.allows_unused()) {
    unused_.keep(bucket, parameters_, launch.store);
  }
  const std::shared_ptr<GradBucket> packed = pack(launch);
  const Recorder::Scope launching(recorder_, Activity::Launch, bucket.index);
  const auto handed_over = Clock::now();
  auto pending = with_peers(
      launch.process_group, [&] { return describe_average(bucket); },
      [&] {
        const WithoutPythonObjects hidden;
        return launch.hook->run(packed);
      });
  if (const Lock lock(turn_.mutex); phase_ != Phase::Idle) {
    Bucket::Reduction& reduction = bucket.reduction;
    reduction.pending = std::move(pending);
    reduction.handed_over = handed_over;
    reduction.stats.exposed_seconds += seconds_between(handed_over, Clock::now());
    return;
  }
  pending->wait();  // the hook itself has ended the step
}

std::shared_ptr<GradBucket> BucketPipeline::pack(const Launch& launch) {
  Bucket& bucket = *launch.bucket;
  const Recorder::Scope packing(recorder_, Activity::Pack, bucket.index);
  const at::Tensor buffer = bucket.pack(launch.format);
  const auto dtype = launch.format.dtype.value_or(buffer.scalar_type());
  bucket.reduction.stats.packed_bytes += bucket.is_sparse
      ? static_cast<int64_t>(buffer._indices().nbytes() + buffer._values().nbytes())
      : buffer.numel() * static_cast<int64_t>(c10::elementSize(dtype));
  return std::make_shared<GradBucket>(
      bucket.shared_layout(), buffer, launch.index, launch.is_last, launch.step, launch.left_out,
      bucket.finite());
}

// ------------------------------------------------------------------------------------- and back

// Returns the next bucket to be written back while backward goes on, if its average is there.
Bucket* BucketPipeline::next_completed_locked() {
  if (!observer_ || unused_.shares_use() || phase_ != Phase::Collecting ||
      step_.next_finish == step_.next_launch) {
    return nullptr;
  }
  Bucket& bucket = *buckets_.all[step_.next_finish];
  const bool elsewhere = side_stream_ && side_stream_->device() != bucket.device();
  const auto& pending = bucket.reduction.pending;
  if (elsewhere || (pending && !pending->is_complete())) {
    return nullptr;
  }
  ++step_.next_finish;
  return &bucket;
}

void BucketPipeline::finish(Bucket& bucket) {
  if (bucket.progress.skipped) {
    return;
  }
  write_back(bucket, bucket.reduction.pending ? await(bucket) : at::Tensor());
  bucket.reduction.pending.reset();
}

at::Tensor BucketPipeline::await(Bucket& bucket) {
  Bucket::Reduction& reduction = bucket.reduction;
  {
    const Recorder::Scope waiting(recorder_, Activity::Wait, bucket.index);
    const auto start = Clock::now();
    reduction.pending->wait();
    reduction.stats.exposed_seconds += seconds_between(start, Clock::now());
  }
  // Waiting threads wake up before callbacks run, so the time of the callback may still be unset.
  const auto completed = reduction.pending->completed();
  const auto end = completed > reduction.handed_over ? completed : Clock::now();
  const ReductionGroup& group = groups_[bucket.group];
  reduction.stats.hook_seconds += seconds_between(reduction.handed_over, end);
  if (recorder_.is_on()) {
    recorder_.add(
        {.activity = Activity::Hook,
         .index = bucket.index,
         .start = reduction.handed_over,
         .end = end,
         .layout = bucket.shared_layout(),
         .hook = group.hook->name()});
  }
  at::Tensor average = with_peers(
      group.process_group, [&] { return describe_average(bucket); },
      [&] { return reduction.pending->result(); });
  bucket.check_result(average);
  return average;
}

std::string BucketPipeline::describe_average(const Bucket& bucket) const {
  return c10::str(
      "the average of bucket ", bucket.index, " (", bucket.layout().describe(), ") at step ",
      steps());
}

// The averages of parameters that this rank used are written at once, those of others once it is
// known whether any rank used them.
void BucketPipeline::write_back(Bucket& bucket, const at::Tensor& average) {
  if (step_.store.is_nowhere()) {
    return;
  }
  std::vector<size_t> positions;
  positions.reserve(bucket.indices().size());
  for (size_t position = 0; position < bucket.indices().size(); ++position) {
    if (!unused_.may_include(bucket.indices()[position])) {
      positions.push_back(position);
    }
  }
  unpack(bucket, average, positions);
  if (unused_.shares_use() && average.defined()) {
    unused_.defer(bucket, average);
  }
}

// If `average` is undefined, gradients stay as they are.
void BucketPipeline::unpack(
    Bucket& bucket, const at::Tensor& average, const std::vector<size_t>& positions) {
  if (average.defined()) {
    const Recorder::Scope unpacking(recorder_, Activity::Unpack, bucket.index);
    bucket.unpack(average, positions);
  }
  std::shared_ptr<const Observer> observer;
  {
    const Lock lock(turn_.mutex);
    observer = observer_;
  }
  if (observer && !positions.empty() && !step_.observer_error) {
    std::vector<size_t> indices;
    indices.reserve(positions.size());
    for (const size_t position : positions) {
      indices.push_back(bucket.indices()[position]);
    }
    try {
      (*observer)(indices);
    } catch (...) {
      // Not at once: peers that are faster or slower may have launched more buckets or fewer.
      step_.observer_error = std::current_exception();
    }
  }
}

// ---------------------------------------------------------------------------- ending the step

void BucketPipeline::finalize_backward() {
  Turn::Hold turn(turn_);
  {
    Lock lock(turn_.mutex);
    const auto is_draining = [&] { return phase_ == Phase::Draining; };
    lock.wait(turn_.changed, [&] { return turn_.is_open() || !is_draining(); });
    if (!is_draining()) {
      return;
    }
    turn.take();
  }
  or_abort([&] { drain(); });
}

void BucketPipeline::drain() {
  at::RecordFunction range(at::RecordScope::FUNCTION);
  if (range.isActive()) {
    range.before("commhooks: wait for all buckets");
  }
  const Recorder::Scope draining(recorder_, Activity::Drain, static_cast<size_t>(steps()));
  drain_buckets();
  if (unused_.shares_use()) {
    if (groups_.of_users().hook->fails_everywhere()) {
      start_sharing();  // now that the step succeeds: it could not be aborted
    }
    finish_unused();
  }
  unused_.restore(parameters_, step_.store);
  wait_for_awaited();
  if (options_.release_buckets) {
    for (auto& bucket : buckets_.all) {
      bucket->release();
    }
  }
  const std::exception_ptr observer_error = step_.observer_error;
  {
    Lock lock(turn_.mutex);
    check_draining_locked();
    count_step_locked();
    lock.replace(step_, {});
    phase_ = Phase::Idle;
  }
  clear_step();
  if (observer_error) {
    std::rethrow_exception(observer_error);
  }
}

void BucketPipeline::drain_buckets() {
  std::exception_ptr error;
  for (auto& bucket : buckets_.all) {
    bucket->reduction.stats.steps = 1;
    bucket->enter_stream();
  }
  for (size_t b = step_.next_finish; b < buckets_.all.size(); ++b) {
    Bucket& bucket = *buckets_.all[b];
    if (error) {
      if (const auto& pending = bucket.reduction.pending) {
        pending->wait();  // so that no memory is in use when the next step begins
      }
      continue;
    }
    try {
      finish(bucket);
      const Lock lock(turn_.mutex);
      check_draining_locked();
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

void BucketPipeline::wait_for_awaited() {
  decltype(awaited_) awaited;
  {
    const Lock lock(turn_.mutex);
    awaited.swap(awaited_);
  }
  for (const auto& future : awaited) {
    with_peers(
        default_group(), [] { return "what the end of backward was to wait for"; },
        [&] { future->waitAndThrow(); });
  }
}

void BucketPipeline::check_draining_locked() const {
  TORCH_CHECK(
      phase_ == Phase::Draining, groups_.rank_prefix(),
      "The step was aborted before all averages were written back: a hook, an observer or another "
      "thread has called abort() or another method that aborts it.");
}

void BucketPipeline::count_step_locked() {
  for (auto& bucket : buckets_.all) {
    bucket->stats.add(bucket->reduction.stats);
    if (bucket->reduction.handed_over != Clock::time_point() &&
        step_.times.communication_start == Clock::time_point()) {
      step_.times.communication_start = bucket->reduction.handed_over;
    }
  }
  step_.times.communication_end = Clock::now();
  last_times_ = step_.times;
  ++completed_;
}

// Drops what buckets own of a step that has ended. Requires the turn.
void BucketPipeline::clear_step() noexcept {
  for (auto& bucket : buckets_.all) {
    bucket->end_step();
  }
  unused_.end_step();
}

// Parameters that another rank used get a gradient here too; those that no rank used keep theirs.
void BucketPipeline::finish_unused() {
  if (!options_.static_graph && unused_.uses_all()) {
    with_peers(default_group(), describe_sharing, [&] { unused_.wait(); });
    unused_.forget_use();
    return;  // every average has been written
  }
  std::vector<size_t> group_of;
  group_of.reserve(parameters_.size());
  for (const int64_t key : options_.keys) {
    group_of.push_back(groups_.process_group_of(key));
  }
  const auto everywhere = with_peers(
      default_group(), describe_sharing, [&] { return unused_.finish_sharing(group_of); });
  unused_.write_deferred(everywhere, [this](auto&&... what) { unpack(what...); });
  unused_.forget_use();
  if (options_.static_graph) {
    unused_.remember(everywhere);
    if (step_.store.is_nowhere()) {
      tracker_.set_expected(everywhere.gradients);
    }
  }
}

void BucketPipeline::abort() noexcept {
  Turn::Hold hold(turn_);
  Lock lock(turn_.mutex);
  tracker_.end_backward();
  if (phase_ == Phase::Idle || (is_aborting_ && turn_.is_mine())) {
    return;
  }
  const bool is_drained_elsewhere = phase_ == Phase::Draining && !turn_.is_open();
  phase_ = Phase::Failed;
  tracker_.expect_local();  // the rest of the backward that has failed
  turn_.changed.notify_all();
  const bool has_gradients = step_.times.backward_start != Clock::time_point();
  if (is_drained_elsewhere) {
    hold.help();  // so that the step does not end before the hooks have been told to abort
    // The other thread waits for their results.
    lock.without([&] { groups_.abort(has_gradients); });
    hold.end();
  }
  lock.wait(turn_.changed, [&] {
    return phase_ != Phase::Failed || (turn_.is_open() && !turn_.has_helpers());
  });
  if (phase_ != Phase::Failed) {
    return;  // another thread has cleared the step
  }
  hold.take();
  is_aborting_ = true;
  lock.without([&] {
    groups_.abort(has_gradients);
    // Other ranks have launched these buckets too, or have exited, so each completes or fails.
    for (auto& bucket : buckets_.all) {
      if (const auto& pending = bucket->reduction.pending) {
        pending->wait();
      }
    }
    clear_step();
    // So that the next step does not overwrite memory that other ranks may still be reading.
    for (auto& bucket : buckets_.all) {
      bucket->release();
    }
    unused_.forget_use();
  });
  is_aborting_ = false;
  tracker_.forget_order();
  lock.replace(step_, {});
  lock.replace(awaited_, {});
  phase_ = Phase::Idle;
  hold.end();
}

// ----------------------------------------------------------------------------------- observation

std::vector<BucketPipeline::BucketInfo> BucketPipeline::bucket_infos() const {
  const Lock lock(turn_.mutex);
  std::vector<BucketInfo> infos;
  for (const auto& bucket : buckets_.all) {
    infos.push_back(
        {.layout = bucket->shared_layout(),
         .indices = bucket->indices(),
         .bytes = bucket->bytes(),
         .group = bucket->group,
         .is_sparse = bucket->is_sparse,
         .ranks = groups_[bucket->group].ranks,
         .stats = bucket->stats});
  }
  return infos;
}

void BucketPipeline::reset_stats() {
  const Lock lock(turn_.mutex);
  for (auto& bucket : buckets_.all) {
    bucket->stats = {};
  }
}

std::vector<bool> BucketPipeline::skipped_buckets() const {
  const Lock lock(turn_.mutex);
  std::vector<bool> skipped;
  for (const auto& bucket : buckets_.all) {
    skipped.push_back(bucket->progress.skipped);
  }
  return skipped;
}

void BucketPipeline::set_steps(int64_t steps) {
  const Lock lock(turn_.mutex);
  TORCH_CHECK_VALUE(steps >= 0, "The number of steps cannot be negative, found ", steps, ".");
  first_step_ = steps - completed_;
}

}  // namespace commhooks
