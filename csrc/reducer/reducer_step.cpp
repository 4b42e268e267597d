// A step until all its buckets have been handed to the hooks. See Note [How a gradient travels].
#include "reducer/reducer.h"

#include "reducer/graph.h"
#include "reducer/peers.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <sstream>
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
      reducer->on_backward_end();
    }
  }

 private:
  std::weak_ptr<Reducer> reducer_;
  bool ended_ = false;
};

// ------------------------------------------------------------------------------------- beginning

void Reducer::begin_step_locked(Step step) {
  step_ = std::move(step);
  arrivals_.begin_step();
  graph_.begin_step();
  unused_.begin_step(tracks_use_locked());
  groups_.begin_step();
  for (auto& bucket : buckets_) {
    bucket->begin_step(step_.store);
  }
  if (options_.skip_unused_buckets) {
    skip_unused_locked();
  }
  for (const auto& bucket : buckets_) {
    groups_[bucket->group].buckets += bucket->exchange.skipped ? 0 : 1;
  }
  for (size_t index = 0; index < graph_.expected().size(); ++index) {
    if (graph_.expected(index) == 0) {
      step_.absent.push_back(index);
    }
  }
}

void Reducer::skip_unused_locked() {
  std::vector<size_t> absent(buckets_.size(), 0);
  for (const size_t index : step_.absent) {
    ++absent[locations_[index].bucket];
  }
  std::vector<std::string> left_out;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    buckets_[b]->exchange.skipped = absent[b] == buckets_[b]->indices().size();
    if (buckets_[b]->exchange.skipped) {
      const auto& names = buckets_[b]->layout().names;
      left_out.insert(left_out.end(), names.begin(), names.end());
    }
  }
  step_.left_out = std::make_shared<const std::vector<std::string>>(std::move(left_out));
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs, double scale) {
  check_complete(
      "Expected to have finished reduction in the prior iteration before starting a new one. ");
  check_frozen();

  // Without the lock: the graph may be large, and nothing here depends on the step.
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
    begin_step_locked({.scale = scale, .absent = std::move(unreachable)});
  }

  if (needs_outputs()) {
    // Runs before any gradient of a parameter, in the outermost backward, and also on a rank whose
    // outputs do not depend on any parameter.
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

void Reducer::match_backward(const std::vector<bool>& skipped) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_VALUE(
        skipped.size() == buckets_.size(), rank_prefix(), "Expected one flag for each of the ",
        buckets_.size(), " buckets, found ", skipped.size(), " flags.");
    std::vector<size_t> unused;
    for (size_t b = 0; b < buckets_.size(); ++b) {
      if (skipped[b]) {
        const auto& indices = buckets_[b]->indices();
        unused.insert(unused.end(), indices.begin(), indices.end());
      }
    }
    state_.expect();
    begin_step_locked({.store = no_gradients(), .absent = std::move(unused)});
    step_.absent.clear();
    if (!discovering_locked()) {
      for (const size_t index : order_) {
        arrive_locked(index);
      }
    }
  }
  on_backward_end();
  finalize_backward();
}

std::vector<bool> Reducer::skipped_buckets() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<bool> skipped;
  for (const auto& bucket : buckets_) {
    skipped.push_back(bucket->exchange.skipped);
  }
  return skipped;
}

// ------------------------------------------------------------------------------------- gradients

void Reducer::on_backward_start() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!state_.collecting()) {
      return;
    }
    queue_backward_end_locked();
    mark_absent_locked();
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
    // Also in `no_sync`: parameters used there count as used at the next synchronization.
    if (tracks_use_locked() && step_.store->get(parameters_[index]).defined()) {
      unused_.add_use(index);
    }
    if (!state_.collecting()) {
      return;
    }
    recorder_.add_instant(Activity::Gradient, index);
    buckets_[locations_[index].bucket]->add_stream();
    if (discovering_locked()) {
      graph_.watch(index);
      return;
    }
    mark_absent_locked();
    if (options_.static_graph) {
      TORCH_CHECK(
          graph_.expects_more(index), rank_prefix(),
          "Your training graph has changed in this iteration: parameter ", describe({index}),
          " got more gradients than in the first iteration, when it got ", graph_.expected(index),
          ". This is not compatible with static_graph=True.");
      if (!graph_.count(index)) {
        return;
      }
    }
    arrive_locked(index);
    bucket_ready =
        step_.next_launch < buckets_.size() && buckets_[step_.next_launch]->exchange.missing == 0;
  }
  const Location& location = locations_[index];
  Bucket& bucket = *buckets_[location.bucket];
  if (!groups_[bucket.group].hook->passes_through() && !unused_.may_include(index)) {
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
        "its results.");
  }
  step_.times.backward_start = Clock::now();
  step_.store = current_gradients();
  for (auto& bucket : buckets_) {
    bucket->set_store(step_.store);
  }
  auto guard = std::make_shared<BackwardGuard>(weak_from_this());
  torch::autograd::Engine::get_default_engine().queue_callback([guard] { guard->end(); });
  end_queued_ = true;
}

void Reducer::mark_absent_locked() {
  for (const size_t index : std::exchange(step_.absent, {})) {
    arrive_locked(index);
  }
}

void Reducer::arrive_locked(size_t index) {
  TORCH_CHECK(
      arrivals_.add(index), rank_prefix(),
      "Expected to mark a variable ready only once: parameter ", describe({index}),
      " got a gradient again in this iteration. Likely causes: 1) a parameter is used outside "
      "`forward`, or shared between several concurrent forward-backward passes; 2) parameters "
      "are reused in several reentrant backward passes, e.g. several `checkpoint`s around the "
      "same part of the model; 3) with `find_unused_parameters=True`, a parameter that "
      "`forward`'s outputs do not depend on got a gradient after all. If the graph does not "
      "change over iterations, `static_graph=True` supports all of these.");
  --buckets_[locations_[index].bucket]->exchange.missing;
}

void Reducer::end_discovery_locked() {
  for (const size_t index : graph_.learn()) {
    arrive_locked(index);
  }
  for (const size_t index : arrivals_.missing()) {
    arrive_locked(index);
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
    step_.times.backward_end = Clock::now();
    if (step_.times.backward_start != Clock::time_point()) {
      const auto step = static_cast<size_t>(first_step_ + completed_);
      recorder_.add(
          {Activity::Backward, step, step_.times.backward_start, step_.times.backward_end});
    }
  }
  bool waits = true;
  try {
    launch_ready_buckets();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (step_.next_launch < buckets_.size()) {
        // Another backward may bring the rest; otherwise the next forward raises an error.
        return;
      }
      state_.drain();
      waits = !manual_finalization_;
    }
    if (unused_.exchanges_use()) {
      with_peers(process_group_, describe_use_exchange, [&] {
        unused_.usage().start_exchange(
            groups_.process_groups(), graph_.expected(), parameters_.front().device());
      });
    }
  } catch (...) {
    abandon();
    throw;
  }
  if (waits) {
    finalize_backward();
  }
}

// --------------------------------------------------------------------------------------- failure

void Reducer::end_step_locked() {
  step_ = {};
  unused_.forget();
  awaited_.clear();
}

void Reducer::abandon() noexcept {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    end_queued_ = false;
    if (state_.phase() == Phase::Idle) {
      return;
    }
    state_.abandon();
    arrivals_.forget_order();
    end_step_locked();
  }
  {
    // Another thread of autograd may be handing a bucket to its hook; it does not launch any more.
    std::lock_guard<std::recursive_mutex> launching(launch_mutex_);
  }
  groups_.abandon();
  // Other ranks have launched these buckets too, or have exited, so each completes or fails.
  for (auto& bucket : buckets_) {
    if (auto& pending = bucket->exchange.pending) {
      pending->future().wait();
      pending.reset();
    }
  }
  unused_.usage().clear();
}

void Reducer::check_complete(const char* advice) {
  std::vector<size_t> missing;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_.collecting() && any_gradient_locked()) {
      missing = arrivals_.missing();
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
        describe(missing), switched_off.empty() ? "" : " (requires_grad was switched off for: ",
        describe(switched_off), switched_off.empty() ? "" : ")",
        ". If they are meant to be unused in some iterations, or if not all outputs of `forward` "
        "take part in the loss, pass `find_unused_parameters=True`; if the same ones are unused in "
        "every iteration, `static_graph=True` is faster. The reducer has been reset; the next "
        "iteration starts clean.");
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

std::string Reducer::describe(const std::vector<size_t>& indices) const {
  constexpr size_t kMost = 20;
  std::ostringstream text;
  for (size_t i = 0; i < std::min(indices.size(), kMost); ++i) {
    text << (i == 0 ? "" : ", ") << '"' << options_.names[indices[i]] << "\" (index " << indices[i]
         << ")";
  }
  if (indices.size() > kMost) {
    text << " and " << indices.size() - kMost << " more";
  }
  return text.str();
}

std::string Reducer::describe_use_exchange() {
  return "the exchange of which parameters each rank used";
}

std::string Reducer::rank_prefix() const {
  return c10::str("[Rank ", process_group_->getRank(), "] ");
}

}  // namespace commhooks
