// Launches buckets and writes their averages back. See Note [How a gradient travels].
#include "reducer/peers.h"
#include "reducer/reducer.h"

#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>

namespace commhooks {
namespace {

using Clock = Span::Clock;

double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

}  // namespace

// -------------------------------------------------------------------------------- to the hooks

// What the thread that has the turn needs of the step; another thread may end the step meanwhile.
struct Reducer::Launch {
  Bucket* bucket;
  std::shared_ptr<Hook> hook;
  GroupPtr process_group;
  PackFormat format;
  std::shared_ptr<const GradientStore> store;
  size_t index;  // among the buckets of the hook
  bool is_last;
  int64_t step;
  Names left_out;
};

PackFormat Reducer::format_of(const Bucket& bucket) const {
  PackFormat format = groups_[bucket.group].format;
  format.scale *= step_.scale;
  return format;
}

void Reducer::launch_ready_buckets() {
  Turn::Holder turn(turn_, mutex_);
  {
    const Lock lock(mutex_);
    if (!turn_.is_open()) {
      return;
    }
    turn.begin();
  }
  try {
    while (launch_or_finish_next(turn)) {
    }
  } catch (...) {
    abandon();
    throw;
  }
}

// Gives up the turn and returns false if there is nothing to do.
bool Reducer::launch_or_finish_next(Turn::Holder& turn) {
  std::optional<Launch> next;
  Bucket* completed = nullptr;
  {
    const Lock lock(mutex_);
    next = next_launch_locked();
    completed = next ? nullptr : next_completed_locked();
    if (!next && !completed) {
      turn.end();
      return false;
    }
  }
  if (next) {
    launch(*next);
  } else {
    finish_early(*completed);
  }
  return true;
}

bool Reducer::has_ready_bucket_locked() const {
  return state_.collecting() && step_.next_launch < buckets_.all.size() &&
      buckets_.all[step_.next_launch]->progress.missing == 0;
}

std::optional<Reducer::Launch> Reducer::next_launch_locked() {
  while (has_ready_bucket_locked()) {
    Bucket& bucket = *buckets_.all[step_.next_launch++];
    ReductionGroup& group = groups_[bucket.group];
    if (!bucket.progress.skipped && !group.passes_through) {
      const size_t index = group.launched++;
      return Launch{&bucket,       group.hook, group.process_group,        format_of(bucket),
                    step_.store,   index,      index + 1 == group.buckets, first_step_ + completed_,
                    step_.left_out};
    }
  }
  return std::nullopt;
}

void Reducer::launch(const Launch& launch) {
  Bucket& bucket = *launch.bucket;
  at::RecordFunction range(at::RecordScope::FUNCTION);
  if (range.isActive()) {
    range.before(c10::str("commhooks: ", launch.hook->name(), ", bucket ", bucket.index));
  }
  bucket.enter_stream();
  if (options_.gradient_as_bucket_view && needs_outputs()) {
    unused_.keep(bucket, parameters_, *launch.store);
  }
  const std::shared_ptr<GradBucket> packed = pack(launch);
  const Recorder::Scope launching(recorder_, Activity::Launch, bucket.index);
  const auto handed_over = Clock::now();
  auto pending = with_peers(
      launch.process_group, [&] { return describe_average(bucket); },
      [&] { return launch.hook->run(packed); });
  auto completed = std::make_shared<std::atomic<Clock::duration>>(Clock::duration::zero());
  pending->future().addCallback(
      [completed](c10::ivalue::Future&) { *completed = Clock::now().time_since_epoch(); },
      /*uses_future=*/false);  // otherwise it runs on a stream that waits for the hook's
  if (has_ended()) {
    pending->settle();  // the hook itself has ended the step
    return;
  }
  Bucket::Exchange& exchange = bucket.exchange;
  exchange.pending = std::move(pending);
  exchange.completed = std::move(completed);
  exchange.handed_over = handed_over;
  exchange.stats.exposed_seconds += seconds_between(handed_over, Clock::now());
}

std::shared_ptr<GradBucket> Reducer::pack(const Launch& launch) {
  Bucket& bucket = *launch.bucket;
  const Recorder::Scope packing(recorder_, Activity::Pack, bucket.index);
  const at::Tensor buffer = bucket.pack(launch.format);
  bucket.exchange.stats.packed_bytes += static_cast<int64_t>(
      bucket.is_sparse ? buffer._indices().nbytes() + buffer._values().nbytes() : buffer.nbytes());
  return std::make_shared<GradBucket>(
      bucket.shared_layout(), buffer, launch.index, launch.is_last, launch.step, launch.left_out,
      bucket.finite());
}

bool Reducer::has_ended() const {
  const Lock lock(mutex_);
  return state_.phase() == Phase::Idle;
}

// ------------------------------------------------------------------------------------- and back

// Returns the next bucket to be written back while backward goes on, if its average is there.
Bucket* Reducer::next_completed_locked() {
  if (!observer_ || unused_.exchanges_use() || !state_.collecting() ||
      step_.next_finish == step_.next_launch) {
    return nullptr;
  }
  Bucket& bucket = *buckets_.all[step_.next_finish];
  const bool elsewhere = side_stream_ && side_stream_->device() != bucket.device();
  const auto& pending = bucket.exchange.pending;
  if (elsewhere || (pending && !pending->future().completed())) {
    return nullptr;
  }
  ++step_.next_finish;
  return &bucket;
}

void Reducer::finish_early(Bucket& bucket) {
  c10::OptionalStreamGuard stream;
  if (side_stream_) {
    stream.reset_stream(*side_stream_);
  }
  bucket.enter_stream();
  finish(bucket);
}

void Reducer::finish(Bucket& bucket) {
  if (bucket.progress.skipped) {
    return;
  }
  write_back(bucket, bucket.exchange.pending ? await(bucket) : at::Tensor());
  bucket.exchange.pending.reset();
}

at::Tensor Reducer::await(Bucket& bucket) {
  Bucket::Exchange& exchange = bucket.exchange;
  {
    const Recorder::Scope waiting(recorder_, Activity::Wait, bucket.index);
    const auto start = Clock::now();
    exchange.pending->future().wait();
    exchange.stats.exposed_seconds += seconds_between(start, Clock::now());
  }
  // Waiting threads wake up before callbacks run, so the time of the callback may still be unset.
  const Clock::time_point called_back(exchange.completed->load());
  const auto end = called_back > exchange.handed_over ? called_back : Clock::now();
  const ReductionGroup& group = groups_[bucket.group];
  exchange.stats.hook_seconds += seconds_between(exchange.handed_over, end);
  if (recorder_.is_on()) {
    recorder_.add(
        {Activity::Hook, bucket.index, exchange.handed_over, end, bucket.shared_layout(),
         group.hook->name()});
  }
  at::Tensor average = with_peers(
      group.process_group, [&] { return describe_average(bucket); },
      [&] { return exchange.pending->result(); });
  bucket.check_result(average, group.format);
  return average;
}

std::string Reducer::describe_average(const Bucket& bucket) const {
  const auto& names = bucket.layout().names;
  return c10::str(
      "the average of bucket ", bucket.index, " (parameters ", names.front(),
      names.size() > 1 ? c10::str(" ... ", names.back()) : std::string(), ") at step ", steps());
}

// The averages of parameters that this rank used are written at once, those of others once it is
// known whether any rank used them.
void Reducer::write_back(Bucket& bucket, const at::Tensor& average) {
  if (step_.store->is_nowhere()) {
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
  if (unused_.exchanges_use() && average.defined()) {
    unused_.defer(bucket, average);
  }
}

// If `average` is undefined, gradients stay as they are.
void Reducer::unpack(
    Bucket& bucket, const at::Tensor& average, const std::vector<size_t>& positions) {
  if (average.defined()) {
    const Recorder::Scope unpacking(recorder_, Activity::Unpack, bucket.index);
    bucket.unpack(average, positions);
  }
  std::shared_ptr<const Observer> observer;
  {
    const Lock lock(mutex_);
    observer = observer_;
  }
  if (observer && !positions.empty()) {
    std::vector<size_t> indices;
    indices.reserve(positions.size());
    for (const size_t position : positions) {
      indices.push_back(bucket.indices()[position]);
    }
    (*observer)(indices);
  }
}

void Reducer::finalize_backward() {
  Turn::Holder turn(turn_, mutex_);
  {
    Lock lock(mutex_);
    const auto is_draining = [&] { return state_.phase() == Phase::Draining; };
    lock.wait(turn_.changed, [&] { return turn_.is_open() || !is_draining(); });
    if (!is_draining()) {
      return;
    }
    turn.begin();
  }
  try {
    drain();
  } catch (...) {
    abandon();
    throw;
  }
}

void Reducer::drain() {
  at::RecordFunction range(at::RecordScope::FUNCTION);
  if (range.isActive()) {
    range.before("commhooks: wait for all buckets");
  }
  const Recorder::Scope draining(recorder_, Activity::Drain, static_cast<size_t>(steps()));
  drain_buckets();
  if (unused_.exchanges_use()) {
    finish_unused();
  }
  unused_.restore(parameters_, *step_.store);
  wait_for_awaited();
  if (options_.release_buckets) {
    for (auto& bucket : buckets_.all) {
      bucket->release();
    }
  }
  {
    Lock lock(mutex_);
    check_draining_locked();
    count_step_locked();
    lock.replace(step_, {});
    state_.finish();
  }
  clear_step();
}

void Reducer::drain_buckets() {
  std::exception_ptr error;
  for (auto& bucket : buckets_.all) {
    bucket->exchange.stats.steps = 1;
    bucket->enter_stream();
  }
  for (size_t b = step_.next_finish; b < buckets_.all.size(); ++b) {
    Bucket& bucket = *buckets_.all[b];
    if (error) {
      if (const auto& pending = bucket.exchange.pending) {
        pending->settle();  // so that no memory is in use when the next step begins
      }
      continue;
    }
    try {
      finish(bucket);
      const Lock lock(mutex_);
      check_draining_locked();
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

void Reducer::wait_for_awaited() {
  decltype(awaited_) awaited;
  {
    const Lock lock(mutex_);
    awaited.swap(awaited_);
  }
  for (const auto& future : awaited) {
    with_peers(
        process_group_, [] { return "what the end of backward was to wait for"; },
        [&] { future->waitAndThrow(); });
  }
}

void Reducer::check_draining_locked() const {
  TORCH_CHECK(
      state_.phase() == Phase::Draining, rank_prefix(),
      "The step was ended before all averages were written back: a hook, an observer or another "
      "thread has called abandon() or another method that ends it.");
}

void Reducer::count_step_locked() {
  for (auto& bucket : buckets_.all) {
    bucket->stats.add(bucket->exchange.stats);
    if (bucket->exchange.completed && step_.times.communication_start == Clock::time_point()) {
      step_.times.communication_start = bucket->exchange.handed_over;
    }
  }
  step_.times.communication_end = Clock::now();
  last_times_ = step_.times;
  ++completed_;
}

// Drops what buckets own of a step that has ended. Requires the turn.
void Reducer::clear_step() noexcept {
  for (auto& bucket : buckets_.all) {
    bucket->end_step();
  }
  unused_.forget();
}

// Parameters that another rank used get a gradient here too; those that no rank used keep theirs.
void Reducer::finish_unused() {
  Usage& usage = unused_.usage();
  if (!options_.static_graph && usage.all_here()) {
    usage.clear();
    return;  // every average has been written
  }
  std::vector<size_t> group_of(parameters_.size());
  for (size_t index = 0; index < group_of.size(); ++index) {
    group_of[index] = groups_.process_group_of(options_.keys[index]);
  }
  const Usage::Everywhere everywhere = with_peers(
      process_group_, describe_use_exchange, [&] { return usage.finish_exchange(group_of); });
  for (const auto& [bucket, average, positions] : unused_.settle(everywhere)) {
    unpack(*bucket, average, positions);
  }
  usage.clear();
  if (!options_.static_graph) {
    return;
  }
  unused_.remember(everywhere);
  if (step_.store->is_nowhere()) {
    std::vector<int> gradients(parameters_.size());
    for (size_t index = 0; index < gradients.size(); ++index) {
      gradients[index] = everywhere.gradients(index);
    }
    graph_.set_expected(std::move(gradients));
  }
}

}  // namespace commhooks
