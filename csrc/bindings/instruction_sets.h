// The switch of the instruction set: each extension has a copy of the loops and of the choice.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace commhooks {

void register_instruction_sets(pybind11::module_& module);

}  // namespace commhooks
