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

PackFormat Reducer::format_of(const Bucket& bucket) const {
  PackFormat format = groups_[bucket.group].hook->format();
  format.scale *= step_.scale;
  return format;
}

void Reducer::launch_ready_buckets() {
  std::lock_guard<std::recursive_mutex> launching(launch_mutex_);
  while (true) {
    size_t bucket_index = 0;
    Step step;  // a copy, as another thread may end the step
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!state_.collecting() || step_.next_launch == buckets_.size() ||
          buckets_[step_.next_launch]->exchange.missing > 0) {
        break;
      }
      bucket_index = step_.next_launch++;
      step = step_;
    }
    launch(bucket_index, step);
  }
  if (observer_ && !unused_.exchanges_use()) {
    finish_ready_buckets();
  }
}

void Reducer::launch(size_t bucket_index, const Step& step) {
  Bucket& bucket = *buckets_[bucket_index];
  Bucket::Exchange& exchange = bucket.exchange;
  ReductionGroup& group = groups_[bucket.group];
  Hook& hook = *group.hook;
  if (exchange.skipped || hook.passes_through()) {
    return;
  }
  at::RecordFunction range(at::RecordScope::FUNCTION);
  if (range.isActive()) {
    range.before(c10::str("commhooks: ", hook.name(), ", bucket ", bucket_index));
  }
  bucket.enter_stream();
  if (options_.gradient_as_bucket_view && needs_outputs()) {
    unused_.keep(bucket, parameters_, *step.store);
  }
  const at::Tensor buffer = pack(bucket);
  const BucketCall call{bucket.shared_layout(),   buffer,        group.launched++, group.buckets,
                        first_step_ + completed_, step.left_out, bucket.finite()};
  bucket.stats.packed_bytes += static_cast<int64_t>(
      bucket.is_sparse ? call.buffer._indices().nbytes() + call.buffer._values().nbytes()
                       : call.buffer.nbytes());
  const Recorder::Scope launching(recorder_, Activity::Launch, bucket_index);
  exchange.handed_over = Clock::now();
  if (step_.times.communication_start == Clock::time_point()) {
    step_.times.communication_start = exchange.handed_over;
  }
  exchange.pending = with_peers(
      group.process_group, [&] { return describe_average(bucket); },
      [&] { return hook.run(call); });
  exchange.completed = std::make_shared<std::atomic<Clock::duration>>(Clock::duration::zero());
  exchange.pending->future().addCallback(
      [completed = exchange.completed](c10::ivalue::Future&) {
        *completed = Clock::now().time_since_epoch();
      },
      /*uses_future=*/false);  // otherwise it runs on a stream that waits for the hook's
  bucket.stats.exposed_seconds += seconds_between(exchange.handed_over, Clock::now());
}

at::Tensor Reducer::pack(Bucket& bucket) {
  const Recorder::Scope packing(recorder_, Activity::Pack, bucket.index);
  return bucket.pack(format_of(bucket));
}

// ------------------------------------------------------------------------------------- and back

void Reducer::finish_ready_buckets() {
  c10::OptionalStreamGuard stream;
  if (side_stream_) {
    stream.reset_stream(*side_stream_);
  }
  while (step_.next_finish < step_.next_launch) {
    Bucket& bucket = *buckets_[step_.next_finish];
    const bool elsewhere = side_stream_ && side_stream_->device() != bucket.device();
    const auto& pending = bucket.exchange.pending;
    if (elsewhere || (pending && !pending->future().completed())) {
      return;
    }
    ++step_.next_finish;
    bucket.enter_stream();
    finish(bucket);
  }
}

void Reducer::finish(Bucket& bucket) {
  Bucket::Exchange& exchange = bucket.exchange;
  if (exchange.skipped) {
    return;
  }
  write_back(bucket, exchange.pending ? await(bucket) : at::Tensor());
  exchange.pending.reset();
}

at::Tensor Reducer::await(Bucket& bucket) {
  Bucket::Exchange& exchange = bucket.exchange;
  {
    const Recorder::Scope waiting(recorder_, Activity::Wait, bucket.index);
    const auto start = Clock::now();
    exchange.pending->future().wait();
    bucket.stats.exposed_seconds += seconds_between(start, Clock::now());
  }
  // Waiting threads wake up before callbacks run, so the time of the callback may still be unset.
  const Clock::time_point called_back(exchange.completed->load());
  const auto end = called_back > exchange.handed_over ? called_back : Clock::now();
  const Hook& hook = *groups_[bucket.group].hook;
  bucket.stats.hook_seconds += seconds_between(exchange.handed_over, end);
  if (recorder_.is_on()) {
    recorder_.add(
        {Activity::Hook, bucket.index, exchange.handed_over, end, bucket.shared_layout(),
         hook.name()});
  }
  at::Tensor average = with_peers(
      groups_[bucket.group].process_group, [&] { return describe_average(bucket); },
      [&] { return exchange.pending->result(); });
  bucket.check_result(average, hook.format());
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
  if (observer_ && !positions.empty()) {
    std::vector<size_t> indices;
    indices.reserve(positions.size());
    for (const size_t position : positions) {
      indices.push_back(bucket.indices()[position]);
    }
    observer_(indices);
  }
}

void Reducer::finalize_backward() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_.phase() != Phase::Draining) {
      return;
    }
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
  const Recorder::Scope draining(
      recorder_, Activity::Drain, static_cast<size_t>(first_step_ + completed_));
  drain_buckets();
  if (unused_.exchanges_use()) {
    finish_unused();
  }
  unused_.restore(parameters_, *step_.store);
  for (const auto& future : std::exchange(awaited_, {})) {
    with_peers(
        process_group_, [] { return "what the end of backward was to wait for"; },
        [&] { future->waitAndThrow(); });
  }
  if (options_.release_buckets) {
    for (auto& bucket : buckets_) {
      bucket->release();
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  step_.times.communication_end = Clock::now();
  last_times_ = step_.times;
  end_step_locked();
  ++completed_;
  state_.finish();
}

void Reducer::drain_buckets() {
  std::exception_ptr error;
  for (auto& bucket : buckets_) {
    bucket->stats.steps += 1;
    bucket->enter_stream();
  }
  for (size_t b = step_.next_finish; b < buckets_.size(); ++b) {
    Bucket& bucket = *buckets_[b];
    if (error) {
      if (const auto& pending = bucket.exchange.pending) {
        pending->future().wait();  // so that no memory is in use when the next step begins
      }
      continue;
    }
    try {
      finish(bucket);
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (error) {
    std::rethrow_exception(error);
  }
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
