// A step until all its buckets have been handed to the hooks. See Note [How a gradient travels].
#include "reducer/reducer.h"

#include "reducer/graph.h"
#include "reducer/peers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>

#include <utility>

namespace commhooks {
namespace {

using Clock = Span::Clock;

}  // namespace

// Owned by the callback that ends a backward. If autograd drops the callback without running it,
// the backward ended with an exception, and the step is abandoned.
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
      reducer->in_backward([&] { reducer->on_backward_end(); });
    }
  }
  void dismiss() {
    ended_ = true;
  }

 private:
  std::weak_ptr<Reducer> reducer_;
  bool ended_ = false;
};

// ------------------------------------------------------------------------------------- beginning

void Reducer::begin_step_locked(Lock& lock, Step step) {
  lock.replace(step_, std::move(step));
  expects_local_gradients_ = false;
  arrivals_.begin_step();
  graph_.begin_step();
  unused_.begin_step(tracks_use_locked());
  groups_.begin_step();
  for (auto& bucket : buckets_.all) {
    bucket->begin_step();
    bucket->set_store(step_.store);
  }
  if (options_.skip_unused_buckets) {
    skip_unused_locked();
  }
  for (const auto& bucket : buckets_.all) {
    groups_[bucket->group].buckets += bucket->progress.skipped ? 0 : 1;
  }
  for (size_t index = 0; index < graph_.expected().size(); ++index) {
    if (graph_.expected(index) == 0) {
      step_.absent.push_back(index);
    }
  }
}

void Reducer::skip_unused_locked() {
  std::vector<size_t> absent(buckets_.all.size(), 0);
  for (const size_t index : step_.absent) {
    ++absent[buckets_.locations[index].bucket];
  }
  std::vector<std::string> left_out;
  for (size_t b = 0; b < buckets_.all.size(); ++b) {
    buckets_.all[b]->progress.skipped = absent[b] == buckets_.all[b]->indices().size();
    if (buckets_.all[b]->progress.skipped) {
      const auto& names = buckets_.all[b]->layout().names;
      left_out.insert(left_out.end(), names.begin(), names.end());
    }
  }
  step_.left_out = std::make_shared<const std::vector<std::string>>(std::move(left_out));
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs, double scale) {
  check_complete(
      "Expected to have finished reduction in the prior iteration before starting a new one. ");

  // Without the lock: the graph may be large, and nothing here depends on the step.
  std::vector<size_t> unreachable;
  if (options_.find_unused_parameters && !options_.static_graph && !accumulators_.empty()) {
    at::RecordFunction range(at::RecordScope::FUNCTION);
    if (range.isActive()) {
      range.before("commhooks: search_unused_parameters");
    }
    const auto reachable = reachable_nodes(outputs);
    for (size_t index = 0; index < parameters_.size(); ++index) {
      if (reachable.count(accumulators_[index].second.get()) == 0) {
        unreachable.push_back(index);
      }
    }
  }

  {
    Lock lock(mutex_);
    if (accumulators_.empty()) {
      return;  // remove_autograd_hooks() was called
    }
    wait_for_turn_locked(lock);
    state_.expect();
    begin_step_locked(lock, {.scale = scale, .absent = std::move(unreachable)});
  }

  if (needs_outputs()) {
    // Runs before any gradient of a parameter, in the outermost backward, and also on a rank whose
    // outputs do not depend on any parameter.
    for (const auto& output : outputs) {
      if (output.grad_fn()) {
        output.register_hook([weak = weak_from_this()](const at::Tensor& /*grad*/) {
          if (auto reducer = weak.lock()) {
            reducer->in_backward([&] { reducer->on_backward_start(); });
          }
        });
      }
    }
  }
}

void Reducer::match_backward(const std::vector<bool>& skipped) {
  {
    Lock lock(mutex_);
    TORCH_CHECK_VALUE(
        skipped.size() == buckets_.all.size(), rank_prefix(), "Expected one flag for each of the ",
        buckets_.all.size(), " buckets, found ", skipped.size(), " flags.");
    std::vector<size_t> unused;
    for (size_t b = 0; b < buckets_.all.size(); ++b) {
      if (skipped[b]) {
        const auto& indices = buckets_.all[b]->indices();
        unused.insert(unused.end(), indices.begin(), indices.end());
      }
    }
    wait_for_turn_locked(lock);
    state_.expect();
    begin_step_locked(lock, {.store = no_gradients(), .absent = std::move(unused)});
    step_.absent.clear();
    if (!discovering_locked()) {
      for (const size_t index : buckets_.order) {
        note_arrival_locked(index);
        count_down_locked(index);
      }
    }
  }
  on_backward_end();
  finalize_backward();
}

std::vector<bool> Reducer::skipped_buckets() const {
  const Lock lock(mutex_);
  std::vector<bool> skipped;
  for (const auto& bucket : buckets_.all) {
    skipped.push_back(bucket->progress.skipped);
  }
  return skipped;
}

// ------------------------------------------------------------------------------------- gradients

void Reducer::on_backward_start() {
  bool begins = false;
  {
    Lock lock(mutex_);
    if (!state_.collecting()) {
      return;
    }
    begins = begin_backward_locked(lock);
    mark_absent_locked();
  }
  if (begins) {
    queue_backward_end();
  }
  launch_ready_buckets();
}

// What is to be done about a gradient without the lock.
struct Reducer::Gradient {
  bool begins_backward = false;
  bool is_left_out = false;
  std::optional<PackFormat> packs_early;
  bool completes_bucket = false;
};

void Reducer::on_gradient(size_t index) {
  try {
    Turn::Helper helper(turn_, mutex_);
    Gradient gradient = note_gradient(index, helper);
    if (gradient.is_left_out) {
      warn_of_left_out(index);
    }
    if (gradient.begins_backward) {
      queue_backward_end();
    }
    if (gradient.packs_early) {
      gradient.completes_bucket = pack_early(index, *gradient.packs_early, helper);
    }
    if (gradient.completes_bucket) {
      launch_ready_buckets();
    }
  } catch (...) {
    abandon();
    throw;
  }
}

Reducer::Gradient Reducer::note_gradient(size_t index, Turn::Helper& helper) {
  Gradient gradient;
  Lock lock(mutex_);
  // Also in `no_sync`: parameters used there count as used at the next synchronization.
  if (tracks_use_locked() && step_.store->has(parameters_[index])) {
    unused_.add_use(index);
  }
  if (!state_.collecting()) {
    gradient.is_left_out = is_left_out_locked();
    return gradient;
  }
  gradient.begins_backward = begin_backward_locked(lock);
  recorder_.add_instant(Activity::Gradient, index);
  bucket_of(index).add_stream();
  if (discovering_locked()) {
    graph_.watch(index);
    return gradient;
  }
  mark_absent_locked();
  if (!is_last_gradient_locked(index)) {
    return gradient;
  }
  note_arrival_locked(index);
  if (packs_early_locked(index)) {
    gradient.packs_early = format_of(bucket_of(index));
    bucket_of(index).progress.is_packed = true;
    helper.begin();
  } else {
    count_down_locked(index);
    gradient.completes_bucket = has_ready_bucket_locked();
  }
  return gradient;
}

bool Reducer::is_left_out_locked() const {
  return state_.phase() == Phase::Idle && !expects_local_gradients_ && !has_warned_;
}

// Returns whether a bucket is ready.
bool Reducer::pack_early(size_t index, const PackFormat& format, Turn::Helper& helper) {
  const BucketSet::Location& location = buckets_.locations[index];
  Bucket& bucket = *buckets_.all[location.bucket];
  {
    const Recorder::Scope packing(recorder_, Activity::Pack, location.bucket);
    bucket.pack_early(format, location.position);
  }
  const Lock lock(mutex_);
  bucket.progress.is_packed = false;
  count_down_locked(index);
  helper.end();
  return has_ready_bucket_locked();
}

bool Reducer::packs_early_locked(size_t index) const {
  const Bucket& bucket = bucket_of(index);
  return bucket.can_pack_early() && !bucket.progress.is_packed &&
      !groups_[bucket.group].passes_through && !unused_.may_include(index);
}

Bucket& Reducer::bucket_of(size_t index) const {
  return *buckets_.all[buckets_.locations[index].bucket];
}

bool Reducer::begin_backward_locked(Lock& lock) {
  if (std::exchange(end_queued_, true)) {
    return false;
  }
  step_.times.backward_start = Clock::now();
  if (auto store = current_gradients(); store != step_.store) {
    lock.replace(step_.store, std::move(store));
    for (auto& bucket : buckets_.all) {
      bucket->set_store(step_.store);
    }
  }
  return true;
}

void Reducer::queue_backward_end() {
  if (at::GradMode::is_enabled()) {
    TORCH_WARN_ONCE(
        "DistributedDataParallel in a backward with create_graph=True: gradients are averaged, but "
        "higher-order gradients through the average are not. Use torch.autograd.grad and average "
        "its results.");
  }
  auto guard = std::make_shared<BackwardGuard>(weak_from_this());
  try {
    torch::autograd::Engine::get_default_engine().queue_callback([guard] { guard->end(); });
  } catch (...) {
    guard->dismiss();  // the caller abandons the step
    throw;
  }
}

void Reducer::mark_absent_locked() {
  for (const size_t index : std::exchange(step_.absent, {})) {
    note_arrival_locked(index, /*used=*/false);
    count_down_locked(index);
  }
}

bool Reducer::is_last_gradient_locked(size_t index) {
  if (!options_.static_graph) {
    return true;
  }
  TORCH_CHECK(
      graph_.expects_more(index), rank_prefix(),
      "Your training graph has changed in this iteration: parameter ", describe({index}),
      " got more gradients than in the first iteration, when it got ", graph_.expected(index),
      ". This is not compatible with static_graph=True: wrap the module without it if the graph "
      "has to change.");
  return graph_.count(index);
}

void Reducer::note_arrival_locked(size_t index, bool used) {
  TORCH_CHECK(
      arrivals_.add(index, used), rank_prefix(),
      "Expected to mark a variable ready only once: parameter ", describe({index}),
      " got a gradient again in this iteration. Likely causes: 1) a parameter is used outside "
      "`forward`, or shared between several concurrent forward-backward passes; 2) parameters "
      "are reused in several reentrant backward passes, e.g. several `checkpoint`s around the "
      "same part of the model",
      dynamic_graph_locked()
          ? "; 3) `forward` returns tensors in objects that `find_unused_parameters=True` cannot "
            "look into, so that it took the parameter for unused: return them in tuples, lists or "
            "dictionaries"
          : "",
      ". If the graph does not change over iterations, `static_graph=True` supports all of these.");
}

void Reducer::count_down_locked(size_t index) {
  --bucket_of(index).progress.missing;
}

void Reducer::end_discovery_locked() {
  std::vector<size_t> indices = graph_.learn();
  for (const size_t index : indices) {
    note_arrival_locked(index);
    count_down_locked(index);
  }
  for (const size_t index : arrivals_.missing()) {
    note_arrival_locked(index, /*used=*/false);
    count_down_locked(index);
  }
}

void Reducer::on_backward_end() {
  {
    const Lock lock(mutex_);
    end_queued_ = false;
    if (!state_.collecting()) {
      return;
    }
    if (discovering_locked()) {
      end_discovery_locked();
    }
    step_.times.backward_end = Clock::now();
    if (step_.times.backward_start != Clock::time_point()) {
      const auto step = static_cast<size_t>(first_step_ + completed_);
      recorder_.add(
          {Activity::Backward, step, step_.times.backward_start, step_.times.backward_end});
    }
  }
  launch_ready_buckets();
  Turn::Holder turn(turn_, mutex_);
  bool waits = true;
  {
    Lock lock(mutex_);
    lock.wait(turn_.changed, [&] { return turn_.is_open() || !state_.collecting(); });
    if (!state_.collecting() || step_.next_launch < buckets_.all.size()) {
      // Another backward may bring the rest; otherwise the next forward raises an error.
      return;
    }
    turn.begin();
    state_.drain();
    waits = !manual_finalization_;
  }
  if (unused_.exchanges_use()) {
    try {
      with_peers(process_group_, describe_use_exchange, [&] {
        unused_.usage().start_exchange(
            groups_.process_groups(), graph_.expected(), parameters_.front().device());
      });
    } catch (...) {
      abandon();
      throw;
    }
  }
  if (waits) {
    finalize_backward();
  }
}

}  // namespace commhooks
