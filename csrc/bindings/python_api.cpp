#include "bindings/register_apis.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The compiled part of the reducer.";
  commhooks::register_codecs(module);
  commhooks::register_completion_queue(module);
  commhooks::register_copier(module);
  commhooks::register_grad_bucket(module);
  commhooks::register_hooks(module);
  commhooks::register_instruction_sets(module);
  commhooks::register_kernels(module);
  commhooks::register_lowrank(module);
  commhooks::register_reducer(module);
  commhooks::register_sparse(module);
}
