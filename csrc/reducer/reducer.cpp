// Construction, settings, buckets and observation; reducer_step.cpp has the steps.
#include "reducer/reducer.h"
#include "reducer/peers.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/stack.h>
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

// Whether a parameter's reference to its accumulator is to this one, without counting references.
// Its type depends on torch's version.
template <typename T>
bool refers_to(const std::weak_ptr<T>& reference, const std::shared_ptr<T>& accumulator) {
  return !reference.owner_before(accumulator) && !accumulator.owner_before(reference);
}
template <typename T>
bool refers_to(
    const c10::weak_intrusive_ptr<T>& reference, const c10::intrusive_ptr<T>& accumulator) {
  return reference._unsafe_get_target() == accumulator.get();
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
      rank_(process_group_->getRank()),
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
  buckets_ = make_buckets(parameters_, options_, groups_, std::move(order), false);
}

void Reducer::attach() {
  for (size_t index = 0; index < parameters_.size(); ++index) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[index]);
    TORCH_CHECK_VALUE(
        accumulator, "Parameter ", options_.names[index],
        " is not a leaf that requires a gradient.");
    accumulators_.push_back(with_hook(index, std::move(accumulator)));
  }
}

Reducer::Accumulator Reducer::with_hook(size_t index, NodePtr accumulator) {
  auto hook = std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [weak = weak_from_this(), index](
          const torch::autograd::variable_list& outputs,
          const torch::autograd::variable_list& /*inputs*/) {
        if (auto reducer = weak.lock()) {
          reducer->in_backward([&] { reducer->on_gradient(index); });
        }
        return outputs;
      },
      refuse_compiled_autograd);
  // Keep the accumulator, which owns the hook: the parameter only has a weak reference to it.
  const uintptr_t key = accumulator->add_post_hook(std::move(hook));
  return {key, std::move(accumulator)};
}

bool Reducer::is_attached() const {
  const Lock lock(mutex_);
  for (size_t index = 0; index < accumulators_.size(); ++index) {
    const auto* meta = torch::autograd::impl::get_autograd_meta(parameters_[index]);
    if (!refers_to(meta->grad_accumulator_, accumulators_[index].second)) {
      return false;
    }
  }
  return true;
}

void Reducer::reattach() {
  Accumulators former;
  for (size_t index = 0; index < accumulators_.size(); ++index) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[index]);
    if (accumulator && accumulator != accumulators_[index].second) {
      former.push_back(with_hook(index, std::move(accumulator)));
      const Lock lock(mutex_);
      std::swap(former.back(), accumulators_[index]);
    }
  }
  detach(former);
}

void Reducer::wait_for_turn_locked(Lock& lock) {
  lock.wait(turn_.changed, [&] {
    return turn_.is_mine() ||
        (turn_.is_open() && !turn_.has_helpers() && state_.phase() != Phase::Abandoned);
  });
}

void Reducer::detach(const Accumulators& accumulators) {
  for (const auto& [key, accumulator] : accumulators) {
    accumulator->del_post_hook(key);
  }
}

Reducer::~Reducer() {
  detach(accumulators_);
  // Buckets that the hook still has keep their memory alive; waiting for them here could block the
  // thread that drops the last reference.
}

// --------------------------------------------------------------------------------------- buckets

bool Reducer::rebuild_buckets() {
  std::vector<int64_t> own;
  bool unanimously = false;
  {
    const Lock lock(mutex_);
    if (rebuilt_ || options_.stable_buckets || completed_ < next_rebuild_ ||
        state_.phase() != Phase::Idle) {
      return false;
    }
    own = encoded_order_locked();
    unanimously = dynamic_graph_locked();
    next_rebuild_ *= 2;
  }
  at::Tensor codes =
      at::tensor(own, at::TensorOptions().dtype(at::kLong)).to(parameters_.front().device());
  if (!agree_on_order(codes, unanimously)) {
    return false;
  }
  std::vector<size_t> order;
  for (const int64_t code : c10::ArrayRef(codes.const_data_ptr<int64_t>(), codes.numel())) {
    order.push_back(static_cast<size_t>(code) % parameters_.size());
  }
  BucketSet rebuilt =
      make_buckets(parameters_, options_, groups_, order, options_.small_last_bucket);
  Lock lock(mutex_);
  wait_for_turn_locked(lock);
  rebuilt_ = true;
  lock.replace(buckets_, std::move(rebuilt));
  return true;
}

// Returns a code for each parameter in the order of arrival: its index, plus the number of
// parameters if this rank does not use it. If the graph may change, it has to be the same twice;
// otherwise all codes are -1.
std::vector<int64_t> Reducer::encoded_order_locked() const {
  const size_t count = parameters_.size();
  if (dynamic_graph_locked() && !arrivals_.same_order_as_before()) {
    return std::vector<int64_t>(count, -1);
  }
  std::vector<int64_t> codes;
  for (const size_t index : arrivals_.order()) {
    codes.push_back(static_cast<int64_t>(arrivals_.unused(index) ? index + count : index));
  }
  return codes;
}

// Replaces `order` by that of rank 0, on the CPU. Returns whether it is an order and, if
// `unanimously`, that of all ranks.
bool Reducer::agree_on_order(at::Tensor& order, bool unanimously) const {
  std::vector<at::Tensor> tensors = {unanimously ? at::stack({order, -order}) : order};
  if (process_group_->getSize() > 1) {
    c10d::AllreduceOptions minimum;
    minimum.reduceOp = c10d::ReduceOp::MIN;
    with_peers(
        process_group_, [] { return "the agreement on the order of gradients"; },
        [&] {
          (unanimously ? process_group_->allreduce(tensors, minimum)
                       : process_group_->broadcast(tensors))
              ->wait();
        });
  }
  order = unanimously ? tensors[0][0].cpu() : tensors[0].cpu();
  const bool agreed = !unanimously || tensors[0][0].equal(-tensors[0][1]);  // least and greatest
  return agreed && *order.const_data_ptr<int64_t>() >= 0;
}

bool Reducer::has_rebuilt() const {
  const Lock lock(mutex_);
  return rebuilt_;
}

// -------------------------------------------------------------------------------------- settings

void Reducer::set_hook(std::shared_ptr<Hook> hook) {
  const PackFormat format = hook->format();
  const bool passes_through = hook->passes_through();
  Lock lock(mutex_);
  TORCH_CHECK(
      state_.phase() == Phase::Idle || !any_gradient_locked(), rank_prefix(),
      "The hook can only be changed between two steps, and a backward is under way.");
  ReductionGroup& group = groups_.of_users();
  lock.replace(group.hook, std::move(hook));
  group.format = format;
  group.passes_through = passes_through;
}

std::string Reducer::hook_name() const {
  std::shared_ptr<Hook> hook;
  {
    const Lock lock(mutex_);
    hook = groups_.of_users().hook;
  }
  return hook->name();
}

void Reducer::set_keys(std::vector<int64_t> keys) {
  TORCH_CHECK_VALUE(
      keys.size() == parameters_.size(), "Expected one key for each of the ", parameters_.size(),
      " parameters, found ", keys.size(), ".");
  ReducerOptions options = options_;
  options.keys = keys;
  BucketSet rebuilt =
      make_buckets(parameters_, options, groups_, buckets_.order, buckets_.back_to_front);
  Lock lock(mutex_);
  wait_for_turn_locked(lock);
  TORCH_CHECK(
      state_.phase() == Phase::Idle || (state_.collecting() && !any_gradient_locked()),
      rank_prefix(), "Buckets can only be rebuilt between two steps, and a backward is under way.");
  options_.keys = std::move(keys);
  lock.replace(buckets_, std::move(rebuilt));
  if (state_.collecting()) {
    // A forward has announced a backward. With `static_graph`, `absent` follows from the graph.
    if (options_.static_graph) {
      step_.absent.clear();
    }
    begin_step_locked(
        lock, {.scale = step_.scale, .store = step_.store, .absent = std::move(step_.absent)});
  }
}

void Reducer::set_static_graph() {
  const Lock lock(mutex_);
  TORCH_CHECK(
      completed_ == 0 && state_.phase() == Phase::Idle, rank_prefix(),
      "_set_static_graph should be called before training loop starts, but ", completed_,
      " steps have completed.");
  options_.static_graph = true;
  next_rebuild_ = 1;
}

void Reducer::set_process_group(GroupPtr process_group) {
  abandon();
  ReductionGroups groups(process_group, options_.key_groups);
  BucketSet rebuilt =
      make_buckets(parameters_, options_, groups, buckets_.order, buckets_.back_to_front);
  const int rank = process_group->getRank();
  Lock lock(mutex_);
  wait_for_turn_locked(lock);
  lock.replace(process_group_, std::move(process_group));
  rank_ = rank;
  first_step_ += completed_;
  completed_ = 0;
  next_rebuild_ = dynamic_graph_locked() ? 2 : 1;
  rebuilt_ = false;
  graph_.forget();
  unused_.forget_graph();
  lock.replace(groups_, std::move(groups));
  lock.replace(buckets_, std::move(rebuilt));
}

void Reducer::remove_autograd_hooks() {
  abandon();
  Accumulators accumulators;
  {
    const Lock lock(mutex_);
    accumulators.swap(accumulators_);
  }
  detach(accumulators);
}

void Reducer::expect_local_gradients() {
  const Lock lock(mutex_);
  expects_local_gradients_ = true;
}

void Reducer::set_observer(Observer observer) {
  auto shared = observer ? std::make_shared<const Observer>(std::move(observer)) : nullptr;
  Lock lock(mutex_);
  lock.replace(observer_, std::move(shared));
}

void Reducer::await_after_backward(std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures) {
  const Lock lock(mutex_);
  std::move(futures.begin(), futures.end(), std::back_inserter(awaited_));
}

void Reducer::set_manual_finalization(bool manual) {
  const Lock lock(mutex_);
  manual_finalization_ = manual;
}

// ----------------------------------------------------------------------------------- observation

std::vector<Reducer::BucketInfo> Reducer::buckets() const {
  const Lock lock(mutex_);
  std::vector<BucketInfo> infos;
  for (const auto& bucket : buckets_.all) {
    infos.push_back(
        {bucket->shared_layout(), bucket->indices(), bucket->bytes(), bucket->group,
         bucket->is_sparse, groups_[bucket->group].ranks, bucket->stats});
  }
  return infos;
}

void Reducer::reset_stats() {
  const Lock lock(mutex_);
  for (auto& bucket : buckets_.all) {
    bucket->stats = {};
  }
}

StepTimes Reducer::last_times() const {
  const Lock lock(mutex_);
  return last_times_;
}

GroupPtr Reducer::process_group() const {
  const Lock lock(mutex_);
  return process_group_;
}

Arrivals::Use Reducer::last_use() const {
  const Lock lock(mutex_);
  return arrivals_.last_use();
}

std::string Reducer::last_error() const {
  const Lock lock(mutex_);
  return last_error_;
}

void Reducer::set_last_error(std::string text) {
  const Lock lock(mutex_);
  last_error_ = std::move(text);
}

int64_t Reducer::steps() const {
  const Lock lock(mutex_);
  return first_step_ + completed_;
}

void Reducer::set_steps(int64_t steps) {
  const Lock lock(mutex_);
  TORCH_CHECK_VALUE(steps >= 0, "The number of steps cannot be negative, found ", steps, ".");
  first_step_ = steps - completed_;
}

}  // namespace commhooks
