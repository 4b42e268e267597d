#include "reducer/graph.h"

#include <torch/csrc/autograd/variable.h>

namespace commhooks {

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

}  // namespace commhooks
