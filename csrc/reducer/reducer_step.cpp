// The course of a step. See Note [How a gradient travels].
#include "reducer/reducer.h"

#include "reducer/graph.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>

namespace commhooks {
namespace {

using Clock = Span::Clock;

double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

}  // namespace

// Rides on the callback that ends a backward. If autograd drops the callback without running it, the
// backward died from an exception, and so does the step.
class Reducer::BackwardGuard {
 public:
  explicit BackwardGuard(std::weak_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {}
  BackwardGuard(const BackwardGuard&) = delete;
  BackwardGuard& operator=(const BackwardGuard&) = delete;

  ~BackwardGuard() {
    if (auto reducer = reducer_.lock(); reducer && !ended_) {
      reducer->abandon();
    }
  }

  void end() {
    ended_ = true;
    if (auto reducer = reducer_.lock()) {
      reducer->on_backward_end();
    }
  }

 private:
  std::weak_ptr<Reducer> reducer_;
  bool ended_ = false;
};

// ------------------------------------------------------------------------------------- beginning

void Reducer::begin_step_locked(std::vector<size_t> unreachable) {
  last_arrival_order_ = std::move(arrival_order_);
  arrival_order_.clear();
  arrived_.assign(parameters_.size(), 0);
  unreachable_ = std::move(unreachable);
  unused_marked_ = false;
  tracks_use_ = tracks_use_locked();
  next_launch_ = 0;
  next_finish_ = 0;
  remaining_hits_ = expected_hits_;
  store_ = local_gradients();
  times_ = {};
  for (auto& bucket : buckets_) {
    bucket->missing = bucket->indices().size();
    bucket->skipped = false;
    bucket->pending.reset();
    bucket->begin_step(store_);
  }
  if (options_.skip_unused_buckets) {
    skip_unused_locked();
  }
  lane_indices_.assign(lanes_.size(), 0);
  lane_counts_.assign(lanes_.size(), 0);
  for (const auto& bucket : buckets_) {
    lane_counts_[bucket->lane] += bucket->skipped ? 0 : 1;
  }
}

void Reducer::skip_unused_locked() {
  std::vector<size_t> unreachable(buckets_.size(), 0);
  for (const size_t index : unreachable_) {
    ++unreachable[locations_[index].bucket];
  }
  for (size_t b = 0; b < buckets_.size(); ++b) {
    buckets_[b]->skipped = unreachable[b] == buckets_[b]->indices().size();
  }
}

void Reducer::check_complete(const char* advice) {
  std::vector<size_t> missing;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_.collecting() && !arrival_order_.empty()) {
      for (size_t index = 0; index < parameters_.size(); ++index) {
        if (!arrived_[index]) {
          missing.push_back(index);
        }
      }
    }
  }
  if (!missing.empty()) {
    abandon();
    std::vector<size_t> switched_off;
    std::copy_if(
        missing.begin(), missing.end(), std::back_inserter(switched_off),
        [&](size_t index) { return !parameters_[index].requires_grad(); });
    TORCH_CHECK(
        false, rank_prefix(), advice,
        "This error indicates that your module has parameters that were not used in producing "
        "the loss: ",
        describe(missing),
        switched_off.empty() ? "" : " (of which requires_grad was switched off: ",
        describe(switched_off), switched_off.empty() ? "" : ")",
        ". If they are meant to be unused in some iterations, or if not all outputs of `forward` "
        "take part in the loss, pass `find_unused_parameters=True`; if the same ones are unused in every iteration, `static_graph=True` is "
        "faster. The reducer has been reset; the next iteration starts clean.");
  }
}

void Reducer::check_frozen() const {
  for (const auto& [name, parameter] : options_.frozen) {
    TORCH_CHECK(
        !parameter.requires_grad(), rank_prefix(), "Parameter \"", name,
        "\" required no gradient when the module was wrapped, and requires a gradient now, which "
        "would not be averaged: wrap the module again after changing requires_grad.");
  }
}

void Reducer::check_finalized() {
  check_complete("Expected the last backward to have finished reduction. ");
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(
      state_.phase() != Phase::Draining, rank_prefix(),
      "Expected finalize_backward() to have been called after the last backward.");
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs, double scale) {
  check_complete(
      "Expected to have finished reduction in the prior iteration before starting a new one. ");
  check_frozen();

  // Outside the lock: the graph may be large, and nothing here depends on the step.
  std::vector<size_t> unreachable;
  if (options_.find_unused_parameters && !options_.static_graph && !accumulators_.empty()) {
    const auto reachable = reachable_nodes(outputs);
    for (size_t index = 0; index < parameters_.size(); ++index) {
      if (reachable.count(accumulators_[index].second.get()) == 0) {
        unreachable.push_back(index);
      }
    }
  }

  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (accumulators_.empty()) {
      return;  // remove_autograd_hooks() was called
    }
    state_.expect();
    scale_ = scale;
    begin_step_locked(std::move(unreachable));
  }

  if (needs_outputs()) {
    // Fires before any gradient of a parameter, in the outermost backward, and also on a rank whose
    // outputs use no parameter's gradient at all.
    for (const auto& output : outputs) {
      if (output.grad_fn()) {
        output.register_hook([weak = weak_from_this()](const at::Tensor& /*grad*/) {
          if (auto reducer = weak.lock()) {
            reducer->on_backward_start();
          }
        });
      }
    }
  }
}

void Reducer::shadow_backward() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    state_.expect();
    begin_step_locked({});
    shadows_ = true;
    unused_marked_ = true;
    if (!discovering_locked()) {
      remaining_hits_.clear();
      for (const size_t index : order_) {
        arrive_locked(index);
      }
    }
  }
  on_backward_end();
}

// ------------------------------------------------------------------------------------- gradients

void Reducer::on_backward_start() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!state_.collecting()) {
      return;
    }
    queue_backward_end_locked();
    mark_unused_locked();
  }
  launch_ready_buckets();
}

void Reducer::on_gradient(size_t index) {
  bool bucket_ready = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!state_.collecting() && !tracks_use_locked()) {
      return;
    }
    if (state_.collecting()) {
      queue_backward_end_locked();
    }
    // Also in `no_sync`: what was used there counts at the next synchronisation.
    if (tracks_use_locked() && store_->get(parameters_[index]).defined()) {
      usage_.add(index);
    }
    if (!state_.collecting()) {
      return;
    }
    recorder_.add_instant(Activity::Gradient, index);
    buckets_[locations_[index].bucket]->add_stream();
    if (discovering_locked()) {
      remaining_hits_.resize(parameters_.size(), 0);
      ++remaining_hits_[index];
      arrival_order_.push_back(index);
      return;
    }
    mark_unused_locked();
    if (options_.static_graph) {
      TORCH_CHECK(
          remaining_hits_[index] > 0, rank_prefix(),
          "Your training graph has changed in this iteration: parameter ", describe({index}),
          " got more gradients than in the first iteration, when it got ", expected_hits_[index],
          ". This is not compatible with static_graph=True.");
      if (--remaining_hits_[index] > 0) {
        return;
      }
    }
    arrive_locked(index);
    bucket_ready = next_launch_ < buckets_.size() && buckets_[next_launch_]->missing == 0;
  }
  const Location& location = locations_[index];
  Bucket& bucket = *buckets_[location.bucket];
  if (!lanes_[bucket.lane].hook->passes_through() && !may_be_unused(index)) {
    const Recorder::Scope packing(recorder_, Activity::Pack, location.bucket);
    bucket.pack_early(format_of(bucket), location.position);
  }
  if (bucket_ready) {
    launch_ready_buckets();
  }
}

void Reducer::queue_backward_end_locked() {
  if (end_queued_) {
    return;
  }
  if (at::GradMode::is_enabled()) {
    TORCH_WARN_ONCE(
        "DistributedDataParallel in a backward with create_graph=True: gradients are averaged, but "
        "higher-order gradients through the average are not. Use torch.autograd.grad and average "
        "what it returns.");
  }
  times_.backward_start = Clock::now();
  store_ = current_gradients();
  for (auto& bucket : buckets_) {
    bucket->set_store(store_);
  }
  auto guard = std::make_shared<BackwardGuard>(weak_from_this());
  torch::autograd::Engine::get_default_engine().queue_callback([guard] { guard->end(); });
  end_queued_ = true;
}

void Reducer::mark_unused_locked() {
  if (unused_marked_ || discovering_locked()) {
    return;
  }
  unused_marked_ = true;
  for (const size_t index : unreachable_) {
    arrive_locked(index);
  }
  for (size_t index = 0; index < expected_hits_.size(); ++index) {
    if (expected_hits_[index] == 0) {
      arrive_locked(index);
    }
  }
}

void Reducer::arrive_locked(size_t index) {
  TORCH_CHECK(
      !arrived_[index], rank_prefix(), "Expected to mark a variable ready only once: parameter ",
      describe({index}),
      " got a gradient again in this iteration. Likely causes: 1) a parameter is used outside "
      "`forward`, or shared between several concurrent forward-backward passes; 2) parameters "
      "are reused in several reentrant backward passes, e.g. several `checkpoint`s around the "
      "same part of the model; 3) with `find_unused_parameters=True`, a parameter that "
      "`forward`'s outputs do not depend on got a gradient after all. If the graph does not "
      "change over iterations, `static_graph=True` supports all of these.");
  arrived_[index] = 1;
  arrival_order_.push_back(index);
  --buckets_[locations_[index].bucket]->missing;
}

void Reducer::end_discovery_locked() {
  auto order = std::move(arrival_order_);
  arrival_order_.clear();
  expected_hits_ = std::move(remaining_hits_);
  expected_hits_.resize(parameters_.size(), 0);
  remaining_hits_.clear();
  // A parameter counts from its last gradient on.
  for (auto index = order.rbegin(); index != order.rend(); ++index) {
    if (!arrived_[*index]) {
      arrive_locked(*index);
    }
  }
  std::reverse(arrival_order_.begin(), arrival_order_.end());
  for (size_t index = 0; index < parameters_.size(); ++index) {
    if (!arrived_[index]) {
      arrive_locked(index);
    }
  }
}

void Reducer::on_backward_end() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    end_queued_ = false;
    if (!state_.collecting()) {
      return;
    }
    if (discovering_locked()) {
      end_discovery_locked();
    }
    times_.backward_end = Clock::now();
    if (!shadows_) {
      const auto step = static_cast<size_t>(first_step_ + completed_);
      recorder_.add({Activity::Backward, step, times_.backward_start, times_.backward_end});
    }
  }
  bool waits = true;
  try {
    launch_ready_buckets();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (next_launch_ < buckets_.size()) {
        // Another backward may bring the rest; the next forward complains if none does.
        return;
      }
      state_.drain();
      waits = !manual_finalization_ || shadows_;
    }
    if (tracks_use_) {
      usage_.start_exchange(groups_, expected_hits_, parameters_.front().device());
    }
  } catch (...) {
    abandon();
    throw;
  }
  if (waits) {
    finalize_backward();
  }
}

// ------------------------------------------------------------------------------------- reduction

PackFormat Reducer::format_of(const Bucket& bucket) const {
  PackFormat format = lanes_[bucket.lane].hook->format();
  format.scale *= scale_;
  return format;
}

void Reducer::launch_ready_buckets() {
  std::lock_guard<std::mutex> launching(launch_mutex_);
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
  if (observer_ && !tracks_use_ && !shadows_) {
    finish_ready_buckets();
  }
}

void Reducer::launch(size_t bucket_index) {
  Bucket& bucket = *buckets_[bucket_index];
  Hook& hook = *lanes_[bucket.lane].hook;
  if (bucket.skipped || hook.passes_through()) {
    return;
  }
  at::RecordFunction range(at::RecordScope::FUNCTION);
  if (range.isActive()) {
    range.before(c10::str("commhooks: ", hook.name(), ", bucket ", bucket_index));
  }
  bucket.enter_stream();
  if (options_.gradient_as_bucket_view && needs_outputs() && !shadows_) {
    keep_gradients(bucket);
  }
  const PackFormat format = format_of(bucket);
  BucketCall call{
      bucket.shared_layout(), pack(bucket, format), lane_indices_[bucket.lane]++,
      lane_counts_[bucket.lane], first_step_ + completed_};
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

at::Tensor Reducer::pack(Bucket& bucket, const PackFormat& format) {
  const Recorder::Scope packing(recorder_, Activity::Pack, bucket.index);
  return shadows_ ? bucket.pack_zeros(format) : bucket.pack(format);
}

// In view mode the hook works in place on whatever an unused parameter's gradient holds; if no rank
// used the parameter, the gradient must come out as it was.
void Reducer::keep_gradients(const Bucket& bucket) {
  for (const size_t index : bucket.indices()) {
    if (!may_be_unused(index)) {
      continue;
    }
    if (const at::Tensor grad = store_->get(parameters_[index]); grad.defined()) {
      kept_grads_.emplace_back(index, grad.detach().clone());
    }
  }
}

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
  at::Tensor result;
  if (bucket.pending) {
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
    result = bucket.pending->result();
    bucket.check_result(result, hook.format());
  }
  if (!shadows_) {
    write_back(bucket, result);
  }
  bucket.pending.reset();
}

// Parameters that this rank used need no news from the others.
void Reducer::write_back(Bucket& bucket, const at::Tensor& result) {
  std::vector<size_t> positions;
  std::vector<size_t> indices;
  positions.reserve(bucket.indices().size());
  for (size_t position = 0; position < bucket.indices().size(); ++position) {
    const size_t index = bucket.indices()[position];
    if (!may_be_unused(index)) {
      positions.push_back(position);
      indices.push_back(index);
    }
  }
  if (result.defined()) {
    const Recorder::Scope unpacking(recorder_, Activity::Unpack, bucket.index);
    bucket.unpack(result, positions);
    if (tracks_use_) {
      unfinished_.emplace_back(&bucket, result);
    }
  }
  if (observer_ && !indices.empty()) {
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
  if (tracks_use_) {
    finish_unused();
  }
  for (const auto& [index, kept] : kept_grads_) {
    record_on_current_stream(kept);
    store_->get(parameters_[index]).detach().copy_(kept);
  }
  for (const auto& future : std::exchange(awaited_, {})) {
    future->waitAndThrow();
  }
  if (options_.release_buckets) {
    for (auto& bucket : buckets_) {
      bucket->release();
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  kept_grads_.clear();
  scale_ = 1.0;
  shadows_ = false;
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
  if (!options_.static_graph && usage_.all_here()) {
    unfinished_.clear();
    usage_.clear();
    return;  // nobody can have news
  }
  const auto everywhere = usage_.finish_exchange();
  const auto is_used = [&](size_t index) { return everywhere[group_of(index)].used(index); };
  for (auto& [bucket, result] : std::exchange(unfinished_, {})) {
    std::vector<size_t> positions;
    std::vector<size_t> indices;
    for (size_t position = 0; position < bucket->indices().size(); ++position) {
      const size_t index = bucket->indices()[position];
      if (!usage_.here(index) && is_used(index)) {
        positions.push_back(position);
        indices.push_back(index);
      }
    }
    {
      const Recorder::Scope unpacking(recorder_, Activity::Unpack, bucket->index);
      bucket->unpack(result, positions);
    }
    if (observer_ && !indices.empty()) {
      observer_(indices);
    }
  }
  const auto used_elsewhere = [&](const auto& kept) { return is_used(kept.first); };
  kept_grads_.erase(
      std::remove_if(kept_grads_.begin(), kept_grads_.end(), used_elsewhere), kept_grads_.end());
  usage_.clear();
  if (!options_.static_graph) {
    return;
  }
  globally_unused_.resize(parameters_.size());
  for (size_t index = 0; index < parameters_.size(); ++index) {
    globally_unused_[index] = !is_used(index);
    if (shadows_) {
      expected_hits_[index] = everywhere[group_of(index)].hits(index);
    }
  }
}

void Reducer::abandon() noexcept {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    end_queued_ = false;
    if (state_.phase() == Phase::Idle) {
      return;
    }
    state_.abandon();
    arrival_order_.clear();
    kept_grads_.clear();
    unfinished_.clear();
    awaited_.clear();
    scale_ = 1.0;
    shadows_ = false;
  }
  for (const auto& lane : lanes_) {
    lane.hook->abandon();
  }
  // Other ranks have launched these buckets too, or are gone, so each completes or fails.
  for (auto& bucket : buckets_) {
    if (bucket->pending) {
      bucket->pending->future().wait();
      bucket->pending.reset();
    }
  }
  usage_.clear();
}

}  // namespace commhooks
