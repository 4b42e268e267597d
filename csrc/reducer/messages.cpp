#include "reducer/messages.h"

#include <torch/csrc/distributed/c10d/debug.h>

#include <algorithm>
#include <sstream>

namespace commhooks {
namespace {

bool debug_is_off() {
  return c10d::debug_level() == c10d::DebugLevel::Off;
}

}  // namespace

std::string describe(const ReducerOptions& options, const std::vector<size_t>& indices) {
  constexpr size_t kMaxNamed = 20;
  const size_t named = debug_is_off() ? std::min(indices.size(), kMaxNamed) : indices.size();
  std::ostringstream text;
  for (size_t i = 0; i < named; ++i) {
    const size_t index = indices[i];
    text << (i == 0 ? "" : ", ") << options.names[index] << " (index " << index << ")";
  }
  if (named < indices.size()) {
    text << " and " << indices.size() - named << " more";
  }
  return text.str();
}

// Scripts and users know the beginnings of these sentences from torch's wrapper.
std::string explain_missing(
    const ReducerOptions& options,
    const std::vector<at::Tensor>& parameters,
    const std::vector<size_t>& missing,
    int rank) {
  const std::string for_rank = c10::str("did not receive grad for rank ", rank);
  const std::string names =
      c10::str("\nParameters which ", for_rank, ": ", describe(options, missing));
  const std::string indices =
      c10::str("\nParameter indices which ", for_rank, ": ", c10::Join(", ", missing));
  if (options.static_graph) {
    return c10::str(
        "This error indicates that your training graph has changed in this iteration, e.g., one "
        "parameter is used in first iteration, but then got unused in the second iteration. this "
        "is not compatible with static_graph set to True. If the graph has to change, wrap the "
        "module without static_graph and, if parameters are unused in some iterations, with "
        "`find_unused_parameters=True`.",
        indices, names);
  }
  const char* debug = debug_is_off()
      ? " For all names and torch's checks of collectives, set the environment variable "
        "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL."
      : "";
  if (options.find_unused_parameters) {
    return c10::str(
        "This error indicates that your module has parameters that were not used in producing the "
        "loss. Since `find_unused_parameters=True` is enabled, `forward`'s outputs depend on them, "
        "and the loss does not. Make sure that all outputs participate in calculating loss: if it "
        "consists of derivatives of outputs (a gradient penalty), add `0 * output.sum()`; if "
        "`forward` returns objects of your own, e.g. a dataclass, return their tensors in a tuple, "
        "list or dictionary.",
        debug, names, indices);
  }
  std::vector<size_t> switched_off;
  std::copy_if(missing.begin(), missing.end(), std::back_inserter(switched_off), [&](size_t index) {
    return !parameters[index].requires_grad();
  });
  return c10::str(
      "This error indicates that your module has parameters that were not used in producing the "
      "loss. If they are meant to be unused in some iterations, enable their detection by passing "
      "the keyword argument `find_unused_parameters=True`, and make sure that all `forward` "
      "function outputs participate in calculating loss; if the same ones are unused in every "
      "iteration, `static_graph=True` is faster.",
      debug, switched_off.empty() ? "" : "\nrequires_grad was switched off for ",
      describe(options, switched_off), names, indices);
}

}  // namespace commhooks
