// Construction, settings, buckets and observation; reducer_step.cpp has the steps.
#include "reducer/reducer.h"
#include "reducer/peers.h"

#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>

namespace commhooks {
namespace {

// Compiled autograd traces hooks instead of calling them, and cannot trace collectives.
[[noreturn]] void refuse_compiled_autograd(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) {
  TORCH_CHECK(
      false,
      "commhooks.DistributedDataParallel does not work with compiled autograd, which would leave "
      "gradients unsynchronized. Switch it off (torch._dynamo.config.compiled_autograd = False); "
      "torch.compile of the module or of the wrapper works.");
}

}  // namespace

// ----------------------------------------------------------------------------------- construction

std::shared_ptr<Reducer> Reducer::create(
    std::vector<at::Tensor> parameters, ReducerOptions options, GroupPtr process_group) {
  std::shared_ptr<Reducer> reducer(
      new Reducer(std::move(parameters), std::move(options), std::move(process_group)));
  reducer->attach();
  return reducer;
}

Reducer::Reducer(std::vector<at::Tensor> parameters, ReducerOptions options, GroupPtr process_group)
    : parameters_(std::move(parameters)),
      options_(std::move(options)),
      process_group_(std::move(process_group)),
      groups_(process_group_, options_.key_groups),
      graph_(parameters_.size()),
      unused_(parameters_.size()),
      arrivals_(parameters_.size()) {
  const size_t count = parameters_.size();
  TORCH_CHECK_VALUE(count > 0, "A reducer needs at least one parameter that requires a gradient.");
  TORCH_CHECK_VALUE(
      options_.names.size() == count && options_.keys.size() == count &&
          options_.sparse.size() == count,
      "Expected one name, one key and one flag for sparse gradients per parameter, found ", count,
      " parameters, ", options_.names.size(), " names, ", options_.keys.size(), " keys and ",
      options_.sparse.size(), " flags.");
  next_rebuild_ = dynamic_graph_locked() ? 2 : 1;
  side_stream_ = side_stream(parameters_.front().device());
  // Gradients arrive in about the reverse of the order in which parameters were registered.
  std::vector<size_t> order(count);
  std::iota(order.rbegin(), order.rend(), 0);
  set_buckets(order, false);
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
        },
        refuse_compiled_autograd);
    // Keep the accumulator, which owns the hook: the parameter only has a weak reference to it.
    const uintptr_t key = accumulator->add_post_hook(std::move(hook));
    accumulators_.emplace_back(key, std::move(accumulator));
  }
}

void Reducer::detach() {
  for (auto& [key, accumulator] : accumulators_) {
    accumulator->del_post_hook(key);
  }
  accumulators_.clear();
}

Reducer::~Reducer() {
  detach();
  // Buckets that the hook still has keep their memory alive; waiting for them here could block the
  // thread that drops the last reference.
}

// --------------------------------------------------------------------------------------- buckets

void Reducer::set_buckets(const std::vector<size_t>& order, bool back_to_front) {
  order_ = order;
  back_to_front_ = back_to_front;
  // A sparse gradient has a bucket of its own.
  auto keys = options_.keys;
  int64_t unused_key = *std::max_element(keys.begin(), keys.end());
  for (size_t index = 0; index < keys.size(); ++index) {
    if (options_.sparse[index]) {
      keys[index] = ++unused_key;
    }
  }
  std::vector<std::vector<size_t>> plan;
  if (back_to_front) {
    plan = plan_buckets(parameters_, keys, {order_.rbegin(), order_.rend()}, options_.caps);
    std::reverse(plan.begin(), plan.end());
    for (auto& members : plan) {
      std::reverse(members.begin(), members.end());
    }
  } else {
    plan = plan_buckets(parameters_, keys, order_, options_.caps);
  }
  std::stable_partition(plan.begin(), plan.end(), [&](const std::vector<size_t>& members) {
    return options_.keys[members.front()] != options_.late_key;
  });
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
    auto bucket = std::make_unique<Bucket>(
        std::move(parameters), std::move(names), plan[b], options_.gradient_as_bucket_view);
    bucket->index = b;
    const size_t first = plan[b].front();
    bucket->is_sparse = options_.sparse[first];
    bucket->group = groups_.index_of(options_.keys[first], bucket->is_sparse);
    buckets_.push_back(std::move(bucket));
  }
}

bool Reducer::rebuild_buckets() {
  constexpr int64_t kUnstable = -1;
  std::vector<int64_t> order;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (rebuilt_ || options_.stable_buckets || completed_ < next_rebuild_ ||
        state_.phase() != Phase::Idle) {
      return false;
    }
    order.assign(arrivals_.order().begin(), arrivals_.order().end());
    if (dynamic_graph_locked()) {
      next_rebuild_ *= 2;
      if (!arrivals_.same_order_as_before()) {
        order.assign(parameters_.size(), kUnstable);
      }
    }
  }
  at::Tensor agreed =
      at::tensor(order, at::TensorOptions().dtype(at::kLong)).to(parameters_.front().device());
  if (process_group_->getSize() > 1) {
    std::vector<at::Tensor> tensors = {agreed};
    with_peers(
        process_group_, [] { return "the broadcast of the order of gradients"; },
        [&] { process_group_->broadcast(tensors)->wait(); });
  }
  agreed = agreed.cpu();
  const int64_t* indices = agreed.const_data_ptr<int64_t>();
  if (indices[0] == kUnstable) {
    return false;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  rebuilt_ = true;
  set_buckets(std::vector<size_t>(indices, indices + agreed.numel()), options_.small_last_bucket);
  return true;
}

bool Reducer::has_rebuilt() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return rebuilt_;
}

// -------------------------------------------------------------------------------------- settings

void Reducer::set_hook(std::shared_ptr<Hook> hook) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(
      state_.phase() == Phase::Idle || !any_gradient_locked(), rank_prefix(),
      "The hook can only be changed between two steps, and a backward is under way.");
  // The former hook, now in `hook`, is destroyed without the lock: if it is written in Python, that
  // takes the GIL, and the thread that has the GIL may be waiting for the lock.
  groups_.of_users().hook.swap(hook);
}

std::string Reducer::hook_name() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return groups_.of_users().hook->name();
}

void Reducer::set_keys(std::vector<int64_t> keys) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_VALUE(
      keys.size() == parameters_.size(), "Expected one key for each of the ", parameters_.size(),
      " parameters, found ", keys.size(), ".");
  TORCH_CHECK(
      state_.phase() == Phase::Idle || (state_.collecting() && !any_gradient_locked()),
      rank_prefix(), "Buckets can only be rebuilt between two steps, and a backward is under way.");
  options_.keys = std::move(keys);
  set_buckets(order_, back_to_front_);
  if (state_.collecting()) {
    // A forward has announced a backward. With `static_graph`, `absent` follows from the graph.
    if (options_.static_graph) {
      step_.absent.clear();
    }
    begin_step_locked(
        {.scale = step_.scale, .store = step_.store, .absent = std::move(step_.absent)});
  }
}

void Reducer::set_static_graph() {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(
      completed_ == 0 && state_.phase() == Phase::Idle, rank_prefix(),
      "static_graph has to be set before the first forward, but ", completed_,
      " steps have completed.");
  options_.static_graph = true;
  next_rebuild_ = 1;
}

void Reducer::set_process_group(GroupPtr process_group) {
  abandon();
  ReductionGroups groups(process_group, options_.key_groups);
  std::lock_guard<std::mutex> lock(mutex_);
  process_group_ = std::move(process_group);
  first_step_ += completed_;
  completed_ = 0;
  next_rebuild_ = dynamic_graph_locked() ? 2 : 1;
  rebuilt_ = false;
  graph_.forget();
  unused_.forget_all();
  std::swap(groups_, groups);  // the former ones are destroyed without the lock; see set_hook
  set_buckets(order_, back_to_front_);
}

void Reducer::remove_autograd_hooks() {
  abandon();
  std::lock_guard<std::mutex> lock(mutex_);
  detach();
}

void Reducer::set_observer(Observer observer) {
  std::lock_guard<std::mutex> lock(mutex_);
  observer_.swap(observer);  // see set_hook
}

void Reducer::await_after_backward(std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::move(futures.begin(), futures.end(), std::back_inserter(awaited_));
}

void Reducer::set_manual_finalization(bool manual) {
  std::lock_guard<std::mutex> lock(mutex_);
  manual_finalization_ = manual;
}

// ----------------------------------------------------------------------------------- observation

std::vector<Reducer::BucketInfo> Reducer::buckets() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<BucketInfo> infos;
  for (const auto& bucket : buckets_) {
    infos.push_back(
        {bucket->shared_layout(), bucket->indices(), bucket->bytes(), bucket->group,
         bucket->is_sparse, groups_[bucket->group].process_group->getSize(), bucket->stats});
  }
  return infos;
}

void Reducer::reset_stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& bucket : buckets_) {
    bucket->stats = {};
  }
}

StepTimes Reducer::last_times() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_times_;
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

}  // namespace commhooks
