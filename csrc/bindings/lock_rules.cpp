#include "bindings/lock_rules.h"

#include "shared/lock.h"

namespace commhooks {

void register_lock_rules(pybind11::module_& module) {
  Lock::has_gil = &PyGILState_Check;
  module.def(
      "locks_taken_with_gil", [] { return Lock::taken_with_gil.load(); },
      "Return how many locks were taken with the GIL held, which must be none.");
}

}  // namespace commhooks
