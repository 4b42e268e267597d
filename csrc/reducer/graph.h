// The autograd graph of a forward pass.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <unordered_set>
#include <vector>

namespace commhooks {

// Returns all nodes that a backward from `outputs` can reach.
std::unordered_set<const torch::autograd::Node*> reachable_nodes(
    const std::vector<at::Tensor>& outputs);

}  // namespace commhooks
