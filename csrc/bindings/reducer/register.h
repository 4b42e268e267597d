// One function per topic; module.cpp calls them all.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace commhooks {

void register_grad_bucket(pybind11::module_& module);
void register_packing(pybind11::module_& module);
void register_reducer(pybind11::module_& module);

}  // namespace commhooks
