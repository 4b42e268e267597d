#include "reducer/reducer.h"

#include "reducer/graph.h"
#include "reducer/native_hooks.h"

#include <ATen/ops/tensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>
#include <sstream>

namespace commhooks {
namespace {

using Clock = std::chrono::steady_clock;

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

// ----------------------------------------------------------------------------------- construction

std::shared_ptr<Reducer> Reducer::create(
    std::vector<at::Tensor> parameters,
    ReducerOptions options,
    c10::intrusive_ptr<c10d::ProcessGroup> process_group) {
  std::shared_ptr<Reducer> reducer(
      new Reducer(std::move(parameters), std::move(options), std::move(process_group)));
  reducer->attach();
  return reducer;
}

Reducer::Reducer(
    std::vector<at::Tensor> parameters,
    ReducerOptions options,
    c10::intrusive_ptr<c10d::ProcessGroup> process_group)
    : parameters_(std::move(parameters)),
      options_(std::move(options)),
      process_group_(std::move(process_group)),
      hook_(std::make_shared<AverageHook>(process_group_, std::nullopt)) {
  const size_t count = parameters_.size();
  TORCH_CHECK_VALUE(count > 0, "A reducer needs at least one parameter that requires a gradient.");
  TORCH_CHECK_VALUE(
      options_.names.size() == count && options_.groups.size() == count,
      "Expected one name and one group per parameter; got ", count, " parameters, ",
      options_.names.size(), " names and ", options_.groups.size(), " groups.");
  if (needs_outputs()) {
    used_.resize(count, 0);
  }
  // Gradients arrive in about the reverse of the order in which parameters were registered.
  std::vector<size_t> order(count);
  std::iota(order.rbegin(), order.rend(), 0);
  set_buckets(plan_buckets(parameters_, options_.groups, order, options_.caps));
}

void Reducer::attach() {
  for (size_t index = 0; index < parameters_.size(); ++index) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[index]);
    TORCH_CHECK_VALUE(
        accumulator, "Parameter ", options_.names[index],
        " is not a leaf that requires a gradient.");
    auto hook = std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [weak = weak_from_this(), index](
            const torch::autograd::variable_list& outputs,
            const torch::autograd::variable_list& /*inputs*/) {
          if (auto reducer = weak.lock()) {
            reducer->on_gradient(index);
          }
          return outputs;
        });
    // The parameter holds its accumulator weakly; the hook would die with it.
    const uintptr_t key = accumulator->add_post_hook(std::move(hook));
    accumulators_.emplace_back(key, std::move(accumulator));
  }
}

Reducer::~Reducer() {
  for (auto& [key, accumulator] : accumulators_) {
    accumulator->del_post_hook(key);
  }
  // Buckets that are still with the hook keep their memory alive themselves; waiting for them here
  // could block whoever drops the last reference.
}

void Reducer::set_buckets(const std::vector<std::vector<size_t>>& plan) {
  buckets_.clear();
  locations_.assign(parameters_.size(), {});
  for (size_t b = 0; b < plan.size(); ++b) {
    std::vector<at::Tensor> parameters;
    std::vector<std::string> names;
    for (size_t position = 0; position < plan[b].size(); ++position) {
      const size_t index = plan[b][position];
      locations_[index] = {b, position};
      parameters.push_back(parameters_[index]);
      names.push_back(options_.names[index]);
    }
    buckets_.push_back(
        std::make_unique<Bucket>(
            make_bucket_layout(std::move(parameters), std::move(names)), plan[b],
            options_.gradient_as_bucket_view));
  }
}

void Reducer::set_hook(std::shared_ptr<Hook> hook) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(
      state_.phase() == Phase::Idle || arrival_order_.empty(), rank_prefix(),
      "The hook can only be changed between two steps, and a backward is under way.");
  hook_ = std::move(hook);
}

// ---------------------------------------------------------------------------------------- a step

void Reducer::begin_step_locked() {
  for (auto& bucket : buckets_) {
    bucket->missing = bucket->indices().size();
    bucket->pending.reset();
    bucket->begin_step();
  }
  arrived_.assign(parameters_.size(), 0);
  arrival_order_.clear();
  unreachable_.clear();
  unused_marked_ = false;
  tracks_use_ = tracks_use_locked();
  next_launch_ = 0;
  remaining_hits_ = expected_hits_;
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
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
    TORCH_CHECK(
        false, rank_prefix(),
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        "This error indicates that your module has parameters that were not used in producing "
        "the loss: ",
        describe(missing),
        ". If they are meant to be unused in some iterations, pass "
        "`find_unused_parameters=True`, and make sure that all outputs of `forward` take part "
        "in the loss; if the same ones are unused in every iteration, `static_graph=True` is "
        "faster. The reducer has been reset; the next iteration starts clean.");
  }

  // Outside the lock: the graph may be large, and nothing here depends on the step.
  std::vector<size_t> unreachable;
  if (options_.find_unused_parameters && !options_.static_graph) {
    const auto reachable = reachable_nodes(outputs);
    for (size_t index = 0; index < parameters_.size(); ++index) {
      if (reachable.count(accumulators_[index].second.get()) == 0) {
        unreachable.push_back(index);
      }
    }
  }

  {
    std::lock_guard<std::mutex> lock(mutex_);
    state_.expect();
    begin_step_locked();
    unreachable_ = std::move(unreachable);
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
    // Also in `no_sync`: what was used there counts at the next synchronisation.
    if (tracks_use_locked() && parameters_[index].grad().defined()) {
      used_[index] = 1;
    }
    if (!state_.collecting()) {
      return;
    }
    queue_backward_end_locked();
    if (discovering_locked()) {
      if (remaining_hits_.empty()) {
        remaining_hits_.assign(parameters_.size(), 0);
      }
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
  if (!hook_->passes_through() && !may_be_unused(index)) {
    const Location& location = locations_[index];
    buckets_[location.bucket]->pack_early(hook_->format(), location.position);
  }
  if (bucket_ready) {
    launch_ready_buckets();
  }
}

void Reducer::queue_backward_end_locked() {
  if (end_queued_) {
    return;
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
  expected_hits_ = remaining_hits_.empty() ? std::vector<int>(parameters_.size(), 0)
                                           : std::move(remaining_hits_);
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
  }
  try {
    launch_ready_buckets();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (next_launch_ < buckets_.size()) {
        // Another backward may bring the rest; the next forward complains if none does.
        return;
      }
      state_.drain();
    }
    if (tracks_use_) {
      reduce_used_map();
    }
    drain();
  } catch (...) {
    abandon();
    throw;
  }
}

// ------------------------------------------------------------------------------------- reduction

void Reducer::launch_ready_buckets() {
  std::lock_guard<std::mutex> launching(launch_mutex_);
  while (true) {
    size_t bucket_index = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!state_.collecting() || next_launch_ == buckets_.size() ||
          buckets_[next_launch_]->missing > 0) {
        return;
      }
      bucket_index = next_launch_++;
    }
    launch(bucket_index);
  }
}

void Reducer::launch(size_t bucket_index) {
  Bucket& bucket = *buckets_[bucket_index];
  if (hook_->passes_through()) {
    return;
  }
  if (options_.gradient_as_bucket_view && needs_outputs()) {
    // In view mode the hook works in place on whatever an unused parameter's gradient holds; if no
    // rank used the parameter, the gradient must come out as it was.
    for (const size_t index : bucket.indices()) {
      const at::Tensor& grad = parameters_[index].grad();
      if (may_be_unused(index) && grad.defined()) {
        kept_grads_.emplace_back(index, grad.detach().clone());
      }
    }
  }
  RECORD_FUNCTION("commhooks::launch", std::vector<c10::IValue>());
  BucketCall call{
      bucket.shared_layout(), bucket.pack(hook_->format()), bucket_index, buckets_.size(),
      first_step_ + completed_};
  bucket.stats.packed_bytes += static_cast<int64_t>(call.buffer.nbytes());
  bucket.handed_over = Clock::now();
  bucket.pending = hook_->run(call);
  bucket.completed = std::make_shared<std::atomic<Clock::duration>>(Clock::duration::zero());
  bucket.pending->future().addCallback([completed = bucket.completed](c10::ivalue::Future&) {
    *completed = Clock::now().time_since_epoch();
  });
  bucket.stats.exposed_seconds += seconds_between(bucket.handed_over, Clock::now());
}

void Reducer::reduce_used_map() {
  at::Tensor map =
      at::tensor(std::vector<int>(used_.begin(), used_.end()), at::TensorOptions().dtype(at::kInt));
  used_map_ = map.to(parameters_.front().device());
  if (process_group_->getSize() > 1) {
    std::vector<at::Tensor> tensors = {used_map_};
    used_map_work_ = process_group_->allreduce(tensors);
  }
}

void Reducer::drain() {
  RECORD_FUNCTION("commhooks::drain", std::vector<c10::IValue>());
  std::exception_ptr error;
  std::vector<std::pair<Bucket*, at::Tensor>> unfinished;
  for (auto& bucket : buckets_) {
    bucket->stats.steps += 1;
    if (!bucket->pending) {
      continue;  // passed through
    }
    const auto start = Clock::now();
    bucket->pending->future().wait();
    const auto end = Clock::now();
    bucket->stats.exposed_seconds += seconds_between(start, end);
    // Waiters are woken before callbacks run, so a hook that was waited for may have no time yet.
    const Clock::time_point completed(bucket->completed->load());
    bucket->stats.hook_seconds +=
        seconds_between(bucket->handed_over, completed > bucket->handed_over ? completed : end);
    if (error) {
      continue;  // but wait for all, so that no memory is in use when the next step begins
    }
    try {
      const at::Tensor result = bucket->pending->result();
      TORCH_CHECK(
          result.numel() == bucket->numel() && result.device() == bucket->device() &&
              (result.scalar_type() == bucket->dtype() ||
               result.scalar_type() == hook_->format().dtype.value_or(bucket->dtype())),
          rank_prefix(), "The communication hook returned a tensor that does not fit its bucket (",
          describe(bucket->indices()), "): expected ", bucket->numel(), " elements of ",
          bucket->dtype(), " on ", bucket->device(), ", found ", result.numel(), " elements of ",
          result.scalar_type(), " on ", result.device(),
          ". A hook returns the average in the shape and dtype of `bucket.buffer()`.");
      write_back(*bucket, result);
      if (tracks_use_) {
        unfinished.emplace_back(bucket.get(), result);
      }
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (tracks_use_) {
    try {
      finish_unused(unfinished);
    } catch (...) {
      error = error ? error : std::current_exception();
    }
  }
  for (auto& bucket : buckets_) {
    bucket->pending.reset();
  }
  if (error) {
    std::rethrow_exception(error);
  }
  for (const auto& [index, kept] : kept_grads_) {
    parameters_[index].mutable_grad().detach().copy_(kept);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  kept_grads_.clear();
  ++completed_;
  state_.finish();
}

// Parameters that this rank used need no news from the others.
void Reducer::write_back(Bucket& bucket, const at::Tensor& result) {
  std::vector<size_t> positions;
  positions.reserve(bucket.indices().size());
  for (size_t position = 0; position < bucket.indices().size(); ++position) {
    const size_t index = bucket.indices()[position];
    if (!may_be_unused(index)) {
      positions.push_back(position);
    }
  }
  bucket.unpack(result, positions);
}

// Parameters that another rank used get a gradient here too; those that no rank used stay untouched.
void Reducer::finish_unused(std::vector<std::pair<Bucket*, at::Tensor>>& unfinished) {
  if (used_map_work_) {
    used_map_work_->wait();
    used_map_work_.reset();
  }
  const at::Tensor map = used_map_.cpu();
  used_map_.reset();
  const int* uses = map.const_data_ptr<int>();

  for (auto& [bucket, result] : unfinished) {
    std::vector<size_t> positions;
    for (size_t position = 0; position < bucket->indices().size(); ++position) {
      const size_t index = bucket->indices()[position];
      if (!used_[index] && uses[index] > 0) {
        positions.push_back(position);
      }
    }
    bucket->unpack(result, positions);
  }
  const auto used_elsewhere = [&](const auto& kept) { return uses[kept.first] > 0; };
  kept_grads_.erase(
      std::remove_if(kept_grads_.begin(), kept_grads_.end(), used_elsewhere), kept_grads_.end());
  if (options_.static_graph) {
    globally_unused_.resize(parameters_.size());
    std::transform(
        uses, uses + parameters_.size(), globally_unused_.begin(), [](int n) { return n == 0; });
  }
  std::fill(used_.begin(), used_.end(), 0);
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
    std::fill(used_.begin(), used_.end(), 0);
  }
  hook_->abandon();
  // Other ranks have launched these buckets too, or are gone, so each completes or fails.
  for (auto& bucket : buckets_) {
    if (bucket->pending) {
      bucket->pending->future().wait();
      bucket->pending.reset();
    }
  }
  if (used_map_work_) {
    try {
      used_map_work_->wait();
    } catch (const std::exception&) {
      // The error that led here is the one to report.
    }
    used_map_work_.reset();
  }
  used_map_.reset();
}

// --------------------------------------------------------------------------------------- buckets

bool Reducer::rebuild_buckets() {
  std::vector<int64_t> order;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (rebuilt_ || options_.stable_buckets || dynamic_graph_locked() || completed_ == 0 ||
        state_.phase() != Phase::Idle) {
      return false;
    }
    order.assign(arrival_order_.begin(), arrival_order_.end());
  }
  at::Tensor agreed =
      at::tensor(order, at::TensorOptions().dtype(at::kLong)).to(parameters_.front().device());
  if (process_group_->getSize() > 1) {
    std::vector<at::Tensor> tensors = {agreed};
    process_group_->broadcast(tensors)->wait();
  }
  agreed = agreed.cpu();
  const int64_t* indices = agreed.const_data_ptr<int64_t>();

  std::lock_guard<std::mutex> lock(mutex_);
  rebuilt_ = true;
  set_buckets(plan_buckets(
      parameters_, options_.groups, std::vector<size_t>(indices, indices + agreed.numel()),
      options_.caps));
  return true;
}

std::vector<Reducer::BucketInfo> Reducer::buckets() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<BucketInfo> infos;
  for (const auto& bucket : buckets_) {
    const int64_t bytes = bucket->numel() * static_cast<int64_t>(c10::elementSize(bucket->dtype()));
    infos.push_back({bucket->shared_layout(), bytes, bucket->stats});
  }
  return infos;
}

void Reducer::reset_stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& bucket : buckets_) {
    bucket->stats = {};
  }
}

int64_t Reducer::steps() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return first_step_ + completed_;
}

void Reducer::set_steps(int64_t steps) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_VALUE(steps >= 0, "The number of steps cannot be negative, found ", steps, ".");
  first_step_ = steps - completed_;
}

// ---------------------------------------------------------------------------------------- errors

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

std::string Reducer::rank_prefix() const {
  return c10::str("[Rank ", process_group_->getRank(), "] ");
}

}  // namespace commhooks
