#include "reducer/reducer.h"

#include "reducer/messages.h"
#include "reducer/peers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

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

// Calls a function when a gradient reaches an output.
class OutputHook : public torch::autograd::FunctionPreHook {
 public:
  OutputHook(const Reducer* owner, std::function<void()> function)
      : owner_(owner), function_(std::move(function)) {}

  // Adds it to `node`, in place of the owner's former one: modules may return one output again and
  // again, whose node would collect hooks.
  static void set(
      torch::autograd::Node& node, const Reducer* owner, std::function<void()> function) {
    for (const auto& hook : node.pre_hooks()) {
      if (auto* own = dynamic_cast<OutputHook*>(hook.get()); own && own->owner_ == owner) {
        own->function_ = std::move(function);
        return;
      }
    }
    node.add_pre_hook(std::make_unique<OutputHook>(owner, std::move(function)));
  }

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    function_();
    return gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    refuse_compiled_autograd(args);
  }

 private:
  const Reducer* owner_;
  std::function<void()> function_;
};

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

// Returns all nodes that a backward from `outputs` can reach.
std::unordered_set<const torch::autograd::Node*> reachable_nodes(
    const std::vector<at::Tensor>& outputs) {
  std::unordered_set<const torch::autograd::Node*> seen;
  std::vector<const torch::autograd::Node*> to_visit;
  const auto visit = [&](const torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) {
      to_visit.push_back(node);
    }
  };
  for (const auto& output : outputs) {
    if (output.requires_grad()) {
      // If the output is itself a parameter, this is its gradient accumulator.
      visit(torch::autograd::impl::gradient_edge(output).function.get());
    }
  }
  while (!to_visit.empty()) {
    const auto* node = to_visit.back();
    to_visit.pop_back();
    for (const auto& edge : node->next_edges()) {
      visit(edge.function.get());
    }
  }
  return seen;
}

ReducerOptions checked(ReducerOptions options, size_t count) {
  TORCH_CHECK_VALUE(count > 0, "A reducer needs at least one parameter that requires a gradient.");
  TORCH_CHECK_VALUE(
      options.names.size() == count && options.keys.size() == count &&
          options.sparse.size() == count,
      "Expected one name, one key and one flag for sparse gradients per parameter, found ", count,
      " parameters, ", options.names.size(), " names, ", options.keys.size(), " keys and ",
      options.sparse.size(), " flags.");
  return options;
}

}  // namespace

// ----------------------------------------------------------------------------------- construction

std::shared_ptr<Reducer> Reducer::create(
    std::vector<at::Tensor> parameters,
    ReducerOptions options,
    GroupPtr process_group,
    TransportPtr transport) {
  std::shared_ptr<Reducer> reducer(
      new Reducer(std::move(parameters), std::move(options), process_group, std::move(transport)));
  reducer->attach();
  return reducer;
}

Reducer::Reducer(
    std::vector<at::Tensor> parameters,
    ReducerOptions options,
    const GroupPtr& process_group,
    TransportPtr transport)
    : parameters_(std::move(parameters)),
      options_(checked(std::move(options), parameters_.size())),
      tracker_(options_),
      pipeline_(parameters_, options_, tracker_, process_group, std::move(transport)) {
  wait_to_rebuild_locked();
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
  const Lock lock = pipeline_.lock();
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
      const Lock lock = pipeline_.lock();
      std::swap(former.back(), accumulators_[index]);
    }
  }
  detach(former);
}

void Reducer::remove_autograd_hooks() {
  pipeline_.abort();
  Accumulators accumulators;
  {
    const Lock lock = pipeline_.lock();
    accumulators.swap(accumulators_);
  }
  detach(accumulators);
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

// ----------------------------------------------------------------------------------- collecting

void Reducer::begin_step(const std::vector<at::Tensor>& outputs, double scale) {
  check_complete(
      "Expected to have finished reduction in the prior iteration before starting a new one. ");

  // Without the lock: the graph may be large, and nothing here depends on the step.
  std::vector<size_t> unreachable;
  if ((options_.graph_may_change() || is_learning()) && !accumulators_.empty()) {
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
  const bool reaches_none = unreachable.size() == parameters_.size();
  if (!options_.graph_may_change()) {
    unreachable.clear();
  }

  int64_t announcement = 0;
  {
    Lock lock = pipeline_.lock();
    if (accumulators_.empty()) {
      return;  // remove_autograd_hooks() was called
    }
    pipeline_.begin_step_locked(lock, {.scale = scale}, std::move(unreachable));
    announcement = ++announcements_;
    backward_reached_outputs_ = false;
    const auto has_graph = [](const auto& it) { return it.grad_fn() || !it.requires_grad(); };
    const auto needs_none = [](const auto& it) { return !it.requires_grad(); };
    outputs_have_graph_ = std::all_of(outputs.begin(), outputs.end(), has_graph) &&
        !std::all_of(outputs.begin(), outputs.end(), needs_none);
    reaches_no_parameter_ =
        needs_outputs() && (reaches_none || tracker_.absent().size() == parameters_.size());
  }

  const torch::autograd::Node* last = nullptr;
  for (const auto& output : outputs) {
    const auto& node = output.grad_fn();
    if (node && std::exchange(last, node.get()) != node.get()) {
      OutputHook::set(*node, this, [weak = weak_from_this(), announcement] {
        if (auto reducer = weak.lock()) {
          reducer->in_backward([&] { reducer->on_backward_start(announcement); });
        }
      });
    }
  }
}

void Reducer::match_backward(const std::vector<bool>& skipped) {
  {
    Lock lock = pipeline_.lock();
    const auto& buckets = pipeline_.buckets().all;
    TORCH_CHECK_VALUE(
        skipped.size() == buckets.size(), rank_prefix(), "Expected one flag for each of the ",
        buckets.size(), " buckets, found ", skipped.size(), " flags.");
    std::vector<size_t> unused;
    for (size_t b = 0; b < buckets.size(); ++b) {
      if (skipped[b]) {
        unused.insert(unused.end(), buckets[b]->indices().begin(), buckets[b]->indices().end());
      }
    }
    pipeline_.begin_step_locked(lock, {.store = GradientStore::nowhere()}, std::move(unused));
    reaches_no_parameter_ = true;
    tracker_.take_absent();
    if (!tracker_.is_learning()) {
      for (const size_t index : pipeline_.buckets().order) {
        note_arrival_locked(index);
        pipeline_.count_down_locked(index);
      }
    }
  }
  on_backward_end();
  pipeline_.finalize_backward();
}

// Runs before any gradient of a parameter, in the outermost backward, and also on a rank whose
// outputs depend on no parameter; also in torch.autograd.grad(), which accumulates no gradients.
void Reducer::on_backward_start(int64_t announcement) {
  bool was_doubtful = false;
  bool begins = false;
  {
    Lock lock = pipeline_.lock();
    if (announcement == announcements_ && tracker_.expects_local()) {
      was_doubtful = !std::exchange(backward_reached_outputs_, true);
    }
    if (needs_outputs() && is_collecting_locked()) {
      begins = pipeline_.begin_backward_locked(lock);
      if (reaches_no_parameter_) {
        mark_absent_locked();
      }
    }
  }
  if (was_doubtful) {
    torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
      if (auto reducer = weak.lock()) {
        const Lock lock = reducer->pipeline_.lock();
        reducer->backward_reached_outputs_ = false;
      }
    });
  }
  if (begins) {
    queue_backward_end();
    pipeline_.launch_ready_buckets();
  }
}

void Reducer::on_gradient(size_t index) {
  pipeline_.or_abort([&] {
    Turn::Hold helper(pipeline_.turn());
    // The work that needs no lock.
    bool is_unannounced = false;
    bool begins_backward = false;
    std::optional<PackFormat> packs_early;
    bool completes_bucket = false;
    {
      Lock lock = pipeline_.lock();
      pipeline_.note_use_locked(index);
      if (is_local_locked()) {
        is_unannounced =
            pipeline_.phase_locked() == Phase::Idle && !tracker_.expects_local() && !has_warned_;
      } else {
        begins_backward = pipeline_.begin_backward_locked(lock);
        pipeline_.note_gradient_locked(index);
        if (tracker_.is_learning()) {
          tracker_.watch(index);
        } else {
          mark_absent_locked();
          if (is_last_gradient_locked(index)) {
            note_arrival_locked(index);
            packs_early = pipeline_.add_gradient_locked(index, helper);
            completes_bucket = !packs_early && pipeline_.has_ready_bucket_locked();
          }
        }
      }
    }
    if (is_unannounced) {
      warn_of_unannounced(index);
    }
    if (begins_backward) {
      queue_backward_end();
    }
    if (packs_early) {
      completes_bucket = pipeline_.pack_early(index, *packs_early, helper);
    }
    if (completes_bucket) {
      pipeline_.launch_ready_buckets();
    }
  });
}

void Reducer::mark_absent_locked() {
  for (const size_t index : tracker_.take_absent()) {
    note_arrival_locked(index, /*used=*/false);
    pipeline_.count_down_locked(index);
  }
}

void Reducer::queue_backward_end() {
  if (at::GradMode::is_enabled()) {
    TORCH_WARN_ONCE(
        "DistributedDataParallel in a backward with create_graph=True: gradients are averaged, but "
        "higher-order gradients through the average are not. Use torch.autograd.grad and average "
        "its results.");
  }
  // If autograd drops the callback without running it, the backward has ended with an exception.
  const std::shared_ptr<bool> has_run(new bool(false), [weak = weak_from_this()](bool* has_run) {
    if (const auto reducer = weak.lock(); reducer && !*has_run) {
      reducer->pipeline_.abort();
    }
    delete has_run;
  });
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), has_run] {
    *has_run = true;
    if (const auto reducer = weak.lock()) {
      reducer->in_backward([&] { reducer->on_backward_end(); });
    }
  });
}

bool Reducer::is_last_gradient_locked(size_t index) {
  if (!options_.static_graph) {
    return true;
  }
  TORCH_CHECK(
      tracker_.expects_more(index), rank_prefix(),
      "Your training graph has changed in this iteration: parameter ", describe(options_, {index}),
      " got more gradients than in the first iteration, when it got ", tracker_.expected()[index],
      ". This is not compatible with static_graph=True: wrap the module without it if the graph "
      "has to change.");
  return tracker_.count(index);
}

void Reducer::note_arrival_locked(size_t index, bool used) {
  TORCH_CHECK(
      tracker_.add(index, used), rank_prefix(),
      "Expected to mark a variable ready only once: parameter ", describe(options_, {index}),
      " got a gradient again in this iteration. Likely causes: 1) a parameter is used outside "
      "`forward`, or shared between several concurrent forward-backward passes; 2) parameters "
      "are reused in several reentrant backward passes, e.g. several `checkpoint`s around the "
      "same part of the model",
      options_.graph_may_change()
          ? "; 3) `forward` returns tensors in objects that `find_unused_parameters=True` cannot "
            "look into, so that it took the parameter for unused: return them in tuples, lists or "
            "dictionaries"
          : "",
      ". If the graph does not change over iterations, `static_graph=True` supports all of these.");
}

void Reducer::on_backward_end() {
  {
    const Lock lock = pipeline_.lock();
    tracker_.end_backward();
    if (!is_collecting_locked() || (awaits_backward_locked() && !reaches_no_parameter_)) {
      return;
    }
    if (tracker_.is_learning()) {
      tracker_.learn();
      for (size_t index = 0; index < parameters_.size(); ++index) {
        pipeline_.count_down_locked(index);
      }
    }
    pipeline_.end_backward_locked();
  }
  pipeline_.launch_ready_buckets();
  pipeline_.end_collecting();
}

// Warns once of a gradient that no forward has announced, unless it is averaged elsewhere: another
// wrapper of the module, of any kind, has a hook of its own at the same accumulator.
void Reducer::warn_of_unannounced(size_t index) {
  if (accumulators_[index].second->post_hooks().size() > 1 ||
      pipeline_.process_group()->getSize() == 1) {
    return;
  }
  {
    const Lock lock = pipeline_.lock();
    if (std::exchange(has_warned_, true)) {
      return;
    }
  }
  TORCH_WARN(
      rank_prefix(), "The gradients of this backward were not averaged over the ranks: parameter ",
      describe(options_, {index}),
      " got one, and no forward of the wrapper was waiting for a backward. Likely causes: 1) the "
      "module was called past the wrapper (`model.module(x)`): call `model(x)`; 2) a second "
      "backward through one forward (`retain_graph=True`, or a backward for each of several "
      "losses): add up the losses and call backward once, or call `model(x)` again before each "
      "backward. If gradients are to stay local for now, run forward and backward in "
      "`model.no_sync()`. This warning appears once.");
}

void Reducer::check_complete(const char* advice) {
  std::vector<size_t> missing;
  {
    const Lock lock = pipeline_.lock();
    if (is_collecting_locked() && tracker_.any()) {
      missing = tracker_.missing();
    }
  }
  if (!missing.empty()) {
    pipeline_.abort();
    TORCH_CHECK(
        false, rank_prefix(), advice,
        explain_missing(options_, parameters_, missing, pipeline_.groups().rank()),
        "\nThe reducer has been reset; the next iteration starts clean.");
  }
}

void Reducer::check_finalized() {
  check_complete("Expected the last backward to have finished reduction. ");
  const Lock lock = pipeline_.lock();
  TORCH_CHECK(
      pipeline_.phase_locked() != Phase::Draining, rank_prefix(),
      "Expected finalize_backward() to have been called after the last backward.");
}

// ------------------------------------------------------------------------------------- settings

bool Reducer::rebuild_buckets() {
  std::vector<int64_t> own;
  bool unanimously = false;
  {
    const Lock lock = pipeline_.lock();
    if (rebuilt_ || options_.stable_buckets || pipeline_.completed_locked() < next_rebuild_ ||
        pipeline_.phase_locked() != Phase::Idle) {
      return false;
    }
    own = tracker_.encoded_order();
    unanimously = options_.graph_may_change();
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
  BucketSet rebuilt = make_buckets(parameters_, options_, pipeline_.groups(), std::move(order));
  Lock lock = pipeline_.lock();
  pipeline_.wait_for_turn_locked(lock);
  rebuilt_ = true;
  pipeline_.replace_buckets_locked(lock, std::move(rebuilt));
  return true;
}

// Replaces `order` by that of rank 0, on the CPU. Returns whether it is an order and, if
// `unanimously`, that of all ranks.
bool Reducer::agree_on_order(at::Tensor& order, bool unanimously) const {
  std::vector<at::Tensor> tensors = {unanimously ? at::stack({order, -order}) : order};
  const GroupPtr group = pipeline_.process_group();
  if (group->getSize() > 1) {
    c10d::AllreduceOptions minimum;
    minimum.reduceOp = c10d::ReduceOp::MIN;
    with_peers(
        group, [] { return "the agreement on the order of gradients"; },
        [&] {
          (unanimously ? group->allreduce(tensors, minimum) : group->broadcast(tensors))->wait();
        });
  }
  order = unanimously ? tensors[0][0].cpu() : tensors[0].cpu();
  const bool agreed = !unanimously || tensors[0][0].equal(-tensors[0][1]);  // least and greatest
  return agreed && *order.const_data_ptr<int64_t>() >= 0;
}

void Reducer::set_keys(std::vector<int64_t> keys) {
  TORCH_CHECK_VALUE(
      keys.size() == parameters_.size(), "Expected one key for each of the ", parameters_.size(),
      " parameters, found ", keys.size(), ".");
  ReducerOptions options = options_;
  options.keys = keys;
  BucketSet rebuilt =
      make_buckets(parameters_, options, pipeline_.groups(), pipeline_.buckets().order);
  Lock lock = pipeline_.lock();
  pipeline_.wait_for_turn_locked(lock);
  TORCH_CHECK(
      pipeline_.phase_locked() == Phase::Idle || (is_collecting_locked() && !tracker_.any()),
      rank_prefix(), "Buckets can only be rebuilt between two steps, and a backward is under way.");
  options_.keys = std::move(keys);
  pipeline_.replace_buckets_locked(lock, std::move(rebuilt));
  if (is_collecting_locked()) {
    // A forward has announced a backward. With `static_graph`, `absent` follows from the graph.
    const Step& step = pipeline_.step_locked();
    pipeline_.begin_step_locked(
        lock, {.scale = step.scale, .store = step.store},
        options_.static_graph ? std::vector<size_t>() : tracker_.absent());
  }
}

void Reducer::set_static_graph() {
  const Lock lock = pipeline_.lock();
  TORCH_CHECK(
      pipeline_.completed_locked() == 0 && pipeline_.phase_locked() == Phase::Idle, rank_prefix(),
      "_set_static_graph should be called before training loop starts, but ",
      pipeline_.completed_locked(), " steps have completed",
      pipeline_.phase_locked() == Phase::Idle ? "." : " and a forward has announced a backward.");
  options_.static_graph = true;
  wait_to_rebuild_locked();
}

void Reducer::set_process_group(const GroupPtr& process_group, TransportPtr transport) {
  pipeline_.abort();
  ReductionGroups groups(process_group, options_.key_groups, std::move(transport));
  BucketSet rebuilt = make_buckets(parameters_, options_, groups, pipeline_.buckets().order);
  Lock lock = pipeline_.lock();
  pipeline_.wait_for_turn_locked(lock);
  pipeline_.replace_groups_locked(lock, std::move(groups), std::move(rebuilt));
  tracker_.forget_graph();
  rebuilt_ = false;
  wait_to_rebuild_locked();
}

// Rebuilds in the first step after which the order of gradients may be known.
void Reducer::wait_to_rebuild_locked() {
  next_rebuild_ = options_.graph_may_change() ? 2 : 1;
}

}  // namespace commhooks
