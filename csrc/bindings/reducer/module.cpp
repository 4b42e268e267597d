#include "bindings/reducer/register.h"
#include "bindings/shared.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The engine: the reducer, its buckets, its native hooks, and packing.";
  commhooks::register_shared(module);
  commhooks::register_grad_bucket(module);
  commhooks::register_module_changes(module);
  commhooks::register_packing(module);
  commhooks::register_peers();
  commhooks::register_reducer(module);
}
