// The end of a step that fails, and what its errors say.
#include "reducer/reducer.h"

#include <torch/csrc/distributed/c10d/debug.h>

#include <algorithm>
#include <sstream>

namespace commhooks {
namespace {

bool debug_is_off() {
  return c10d::debug_level() == c10d::DebugLevel::Off;
}

}  // namespace

void Reducer::abandon() noexcept {
  Turn::Helper helper(turn_, mutex_);
  bool is_drained_elsewhere = false;
  {
    const Lock lock(mutex_);
    end_queued_ = false;
    if (state_.phase() == Phase::Idle || (is_dropping_ && turn_.is_mine())) {
      return;
    }
    is_drained_elsewhere = state_.phase() == Phase::Draining && !turn_.is_open();
    if (is_drained_elsewhere) {
      helper.begin();  // the step does not end before this thread has spoken to the hooks
    }
    state_.abandon();
    expects_local_gradients_ = true;  // the rest of the backward that has failed
    turn_.changed.notify_all();
  }
  if (is_drained_elsewhere) {
    groups_.abandon();  // so that the buckets fail that the other thread waits for
    const Lock lock(mutex_);
    helper.end();
  }
  Turn::Holder turn(turn_, mutex_);
  {
    Lock lock(mutex_);
    lock.wait(turn_.changed, [&] {
      return state_.phase() != Phase::Abandoned || (turn_.is_open() && !turn_.has_helpers());
    });
    if (state_.phase() != Phase::Abandoned) {
      return;  // another thread has dropped the buckets
    }
    turn.begin();
    is_dropping_ = true;
  }
  groups_.abandon();
  drop_buckets();
  Lock lock(mutex_);
  is_dropping_ = false;
  arrivals_.forget_order();
  lock.replace(step_, {});
  lock.replace(awaited_, {});
  state_.end();
  turn.end();
  turn_.changed.notify_all();
}

// Other ranks have launched these buckets too, or have exited, so each completes or fails.
void Reducer::drop_buckets() noexcept {
  for (auto& bucket : buckets_.all) {
    if (const auto& pending = bucket->exchange.pending) {
      pending->settle();
    }
  }
  clear_step();
  unused_.usage().clear();
}

void Reducer::check_complete(const char* advice) {
  std::vector<size_t> missing;
  {
    const Lock lock(mutex_);
    if (state_.collecting() && any_gradient_locked()) {
      missing = arrivals_.missing();
    }
  }
  if (!missing.empty()) {
    abandon();
    TORCH_CHECK(
        false, rank_prefix(), advice, explain_missing(missing),
        "\nThe reducer has been reset; the next iteration starts clean.");
  }
}

// Scripts and users know the beginnings of these sentences from torch's wrapper.
std::string Reducer::explain_missing(const std::vector<size_t>& missing) const {
  const std::string for_rank =
      c10::str("did not receive grad for rank ", process_group_->getRank());
  const std::string parameters = c10::str("\nParameters which ", for_rank, ": ", describe(missing));
  const std::string indices =
      c10::str("\nParameter indices which ", for_rank, ": ", c10::Join(", ", missing));
  if (options_.static_graph) {
    return c10::str(
        "This error indicates that your training graph has changed in this iteration, e.g., one "
        "parameter is used in first iteration, but then got unused in the second iteration. this "
        "is not compatible with static_graph set to True. If the graph has to change, wrap the "
        "module without static_graph and, if parameters are unused in some iterations, with "
        "`find_unused_parameters=True`.",
        indices, parameters);
  }
  const char* debug = debug_is_off()
      ? " For all names and torch's checks of collectives, set the environment variable "
        "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL."
      : "";
  if (options_.find_unused_parameters) {
    return c10::str(
        "This error indicates that your module has parameters that were not used in producing the "
        "loss. Since `find_unused_parameters=True` is enabled, `forward`'s outputs depend on them, "
        "and the loss does not. Make sure that all outputs participate in calculating loss: if it "
        "consists of derivatives of outputs (a gradient penalty), add `0 * output.sum()`; if "
        "`forward` returns objects of your own, e.g. a dataclass, return their tensors in a tuple, "
        "list or dictionary.",
        debug, parameters, indices);
  }
  std::vector<size_t> switched_off;
  std::copy_if(missing.begin(), missing.end(), std::back_inserter(switched_off), [&](size_t index) {
    return !parameters_[index].requires_grad();
  });
  return c10::str(
      "This error indicates that your module has parameters that were not used in producing the "
      "loss. If they are meant to be unused in some iterations, enable their detection by passing "
      "the keyword argument `find_unused_parameters=True`, and make sure that all `forward` "
      "function outputs participate in calculating loss; if the same ones are unused in every "
      "iteration, `static_graph=True` is faster.",
      debug, switched_off.empty() ? "" : "\nrequires_grad was switched off for ",
      describe(switched_off), parameters, indices);
}

// Warns once of a gradient that no forward has announced, unless it is averaged elsewhere: another
// wrapper of the module, of any kind, has a hook of its own at the same accumulator.
void Reducer::warn_of_left_out(size_t index) {
  if (accumulators_[index].second->post_hooks().size() > 1 || process_group_->getSize() == 1) {
    return;
  }
  {
    const Lock lock(mutex_);
    if (std::exchange(has_warned_, true)) {
      return;
    }
  }
  TORCH_WARN(
      rank_prefix(), "The gradients of this backward were not averaged over the ranks: parameter ",
      describe({index}),
      " got one, and no forward of the wrapper was waiting for a backward. Likely causes: 1) the "
      "module was called past the wrapper (`model.module(x)`): call `model(x)`; 2) a second "
      "backward through one forward (`retain_graph=True`, or a backward for each of several "
      "losses): add up the losses and call backward once, or call `model(x)` again before each "
      "backward. If gradients are to stay local for now, run forward and backward in "
      "`model.no_sync()`. This warning appears once.");
}

void Reducer::check_finalized() {
  check_complete("Expected the last backward to have finished reduction. ");
  const Lock lock(mutex_);
  TORCH_CHECK(
      state_.phase() != Phase::Draining, rank_prefix(),
      "Expected finalize_backward() to have been called after the last backward.");
}

// Names all parameters at the debug levels INFO and DETAIL, otherwise some.
std::string Reducer::describe(const std::vector<size_t>& indices) const {
  constexpr size_t kMost = 20;
  const size_t named = debug_is_off() ? std::min(indices.size(), kMost) : indices.size();
  std::ostringstream text;
  for (size_t i = 0; i < named; ++i) {
    const size_t index = indices[i];
    text << (i == 0 ? "" : ", ") << options_.names[index] << " (index " << index << ")";
  }
  if (named < indices.size()) {
    text << " and " << indices.size() - named << " more";
  }
  return text.str();
}

std::string Reducer::describe_use_exchange() {
  return "the exchange of which parameters each rank used";
}

std::string Reducer::rank_prefix() const {
  return c10::str("[Rank ", rank_, "] ");
}

}  // namespace commhooks
