// One function per topic; python_api.cpp calls them all.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace commhooks {

void register_codecs(pybind11::module_& module);
void register_completion_queue(pybind11::module_& module);
void register_copier(pybind11::module_& module);
void register_grad_bucket(pybind11::module_& module);
void register_hooks(pybind11::module_& module);
void register_instruction_sets(pybind11::module_& module);
void register_kernels(pybind11::module_& module);
void register_lowrank(pybind11::module_& module);
void register_reducer(pybind11::module_& module);
void register_sparse(pybind11::module_& module);

}  // namespace commhooks
