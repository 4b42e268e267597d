#include "bindings/shared.h"

#include "shared/instruction_sets.h"
#include "shared/lock.h"

namespace py = pybind11;

namespace commhooks {

void register_shared(py::module_& module) {
  module.def("instruction_sets", &instruction_sets, R"(
Return the instruction sets that this CPU supports and loops are compiled for, the widest last.
The widest is the default.)");
  module.def("use_instruction_set", &use_instruction_set, py::arg("name"), R"(
Set the instruction set that the loops of this extension use, for the whole process. The
other extension has a function of its own.)");
  Lock::has_gil = &PyGILState_Check;
  module.def(
      "locks_taken_with_gil", [] { return Lock::taken_with_gil.load(); },
      "Return how many locks were taken with the GIL held, which must be none.");
}

}  // namespace commhooks
