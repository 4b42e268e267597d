// Buckets on their way to the hooks and back. See Note [How a gradient travels].
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
  PackFormat format = lanes_[bucket.lane].hook->format();
  format.scale *= scale_;
  return format;
}

void Reducer::launch_ready_buckets() {
  std::lock_guard<std::recursive_mutex> launching(launch_mutex_);
  while (true) {
    size_t bucket_index = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!state_.collecting() || next_launch_ == buckets_.size() ||
          buckets_[next_launch_]->missing > 0) {
        break;
      }
      bucket_index = next_launch_++;
    }
    launch(bucket_index);
  }
  if (observer_ && !unused_.ranks_tell()) {
    finish_ready_buckets();
  }
}

void Reducer::launch(size_t bucket_index) {
  Bucket& bucket = *buckets_[bucket_index];
  Lane& lane = lanes_[bucket.lane];
  Hook& hook = *lane.hook;
  if (bucket.skipped || hook.passes_through()) {
    return;
  }
  at::RecordFunction range(at::RecordScope::FUNCTION);
  if (range.isActive()) {
    range.before(c10::str("commhooks: ", hook.name(), ", bucket ", bucket_index));
  }
  bucket.enter_stream();
  if (options_.gradient_as_bucket_view && needs_outputs()) {
    unused_.keep(bucket, parameters_, *store_);
  }
  const at::Tensor buffer = pack(bucket);
  const BucketCall call{bucket.shared_layout(),   buffer,    lane.launched++, lane.buckets,
                        first_step_ + completed_, left_out_, bucket.finite()};
  bucket.stats.packed_bytes += static_cast<int64_t>(
      bucket.is_sparse ? call.buffer._indices().nbytes() + call.buffer._values().nbytes()
                       : call.buffer.nbytes());
  const Recorder::Scope launching(recorder_, Activity::Launch, bucket_index);
  bucket.handed_over = Clock::now();
  if (times_.communication_start == Clock::time_point()) {
    times_.communication_start = bucket.handed_over;
  }
  bucket.pending = hook.run(call);
  bucket.completed = std::make_shared<std::atomic<Clock::duration>>(Clock::duration::zero());
  bucket.pending->future().addCallback(
      [completed = bucket.completed](c10::ivalue::Future&) {
        *completed = Clock::now().time_since_epoch();
      },
      /*uses_future=*/false);  // or it would be called on a stream that waits for the hook's
  bucket.stats.exposed_seconds += seconds_between(bucket.handed_over, Clock::now());
}

at::Tensor Reducer::pack(Bucket& bucket) {
  const Recorder::Scope packing(recorder_, Activity::Pack, bucket.index);
  return bucket.pack(format_of(bucket));
}

// ------------------------------------------------------------------------------------- and back

void Reducer::finish_ready_buckets() {
  c10::OptionalStreamGuard aside;
  if (aside_) {
    aside.reset_stream(*aside_);
  }
  while (next_finish_ < next_launch_) {
    Bucket& bucket = *buckets_[next_finish_];
    const bool elsewhere = aside_ && aside_->device() != bucket.device();
    if (elsewhere || (bucket.pending && !bucket.pending->future().completed())) {
      return;
    }
    ++next_finish_;
    bucket.enter_stream();
    finish(bucket);
  }
}

void Reducer::finish(Bucket& bucket) {
  if (bucket.skipped) {
    return;
  }
  write_back(bucket, bucket.pending ? await(bucket) : at::Tensor());
  bucket.pending.reset();
}

at::Tensor Reducer::await(Bucket& bucket) {
  {
    const Recorder::Scope waiting(recorder_, Activity::Wait, bucket.index);
    const auto start = Clock::now();
    bucket.pending->future().wait();
    bucket.stats.exposed_seconds += seconds_between(start, Clock::now());
  }
  // Waiters are woken before callbacks run, so a hook that was waited for may have no time yet.
  const Clock::time_point called_back(bucket.completed->load());
  const auto end = called_back > bucket.handed_over ? called_back : Clock::now();
  const Hook& hook = *lanes_[bucket.lane].hook;
  bucket.stats.hook_seconds += seconds_between(bucket.handed_over, end);
  if (recorder_.is_on()) {
    recorder_.add(
        {Activity::Hook, bucket.index, bucket.handed_over, end, bucket.shared_layout(),
         hook.name()});
  }
  at::Tensor average = bucket.pending->result();
  bucket.check_result(average, hook.format());
  return average;
}

// Parameters that this rank used need no news from the others.
void Reducer::write_back(Bucket& bucket, const at::Tensor& average) {
  if (store_->is_nowhere()) {
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
  if (unused_.ranks_tell() && average.defined()) {
    unused_.defer(bucket, average);
  }
}

// `average` is undefined where gradients stay as they are.
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
  if (unused_.ranks_tell()) {
    finish_unused();
  }
  unused_.restore(parameters_, *store_);
  for (const auto& future : std::exchange(awaited_, {})) {
    future->waitAndThrow();
  }
  if (options_.release_buckets) {
    for (auto& bucket : buckets_) {
      bucket->release();
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  end_step_locked();
  times_.communication_end = Clock::now();
  last_times_ = times_;
  ++completed_;
  state_.finish();
}

void Reducer::drain_buckets() {
  std::exception_ptr error;
  for (auto& bucket : buckets_) {
    bucket->stats.steps += 1;
    bucket->enter_stream();
  }
  for (; next_finish_ < buckets_.size(); ++next_finish_) {
    Bucket& bucket = *buckets_[next_finish_];
    if (error) {
      if (bucket.pending) {
        bucket.pending->future().wait();  // so that no memory is in use when the next step begins
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

// Parameters that another rank used get a gradient here too; those that no rank used stay untouched.
void Reducer::finish_unused() {
  Usage& usage = unused_.usage();
  if (!options_.static_graph && usage.all_here()) {
    usage.clear();
    return;  // nobody can have news
  }
  std::vector<size_t> group_of(parameters_.size());
  for (size_t index = 0; index < group_of.size(); ++index) {
    group_of[index] = lanes_.group_of(options_.keys[index]);
  }
  const Usage::Everywhere everywhere = usage.finish_exchange(group_of);
  for (const auto& [bucket, average, positions] : unused_.settle(everywhere)) {
    unpack(*bucket, average, positions);
  }
  usage.clear();
  if (!options_.static_graph) {
    return;
  }
  unused_.remember(everywhere);
  if (store_->is_nowhere()) {
    std::vector<int> gradients(parameters_.size());
    for (size_t index = 0; index < gradients.size(); ++index) {
      gradients[index] = everywhere.gradients(index);
    }
    graph_.take_over(std::move(gradients));
  }
}

}  // namespace commhooks
