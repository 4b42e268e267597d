// The exports that both extensions have: each has its own copy of the code in shared/.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace commhooks {

void register_shared(pybind11::module_& module);

}  // namespace commhooks
