// Descriptions of parameters in errors.
#pragma once

#include "reducer/options.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace commhooks {

// Names all parameters at the debug levels INFO and DETAIL, otherwise some.
std::string describe(const ReducerOptions& options, const std::vector<size_t>& indices);

// Why a backward may have left parameters without gradients. `missing`: their indices.
std::string explain_missing(
    const ReducerOptions& options,
    const std::vector<at::Tensor>& parameters,
    const std::vector<size_t>& missing,
    int rank);

}  // namespace commhooks
