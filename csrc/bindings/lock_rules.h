// Lets tests check the second rule of Note [Locks and the GIL].
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace commhooks {

void register_lock_rules(pybind11::module_& module);

}  // namespace commhooks
