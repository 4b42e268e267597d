#include "bindings/instruction_sets.h"
#include "bindings/lock_rules.h"
#include "bindings/reducer/register.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The engine: the reducer, its buckets, its native hooks, and packing.";
  commhooks::register_instruction_sets(module);
  commhooks::register_lock_rules(module);
  commhooks::register_grad_bucket(module);
  commhooks::register_native_hooks(module);
  commhooks::register_module_changes(module);
  commhooks::register_packing(module);
  commhooks::register_peers();
  commhooks::register_reducer(module);
}
