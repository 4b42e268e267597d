// One function per topic; module.cpp calls them all.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace commhooks {

void register_comm(pybind11::module_& module);
void register_kernel_arguments(pybind11::module_& module);

}  // namespace commhooks
