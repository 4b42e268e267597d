#include "bindings/register_apis.h"
#include "cpu/instruction_sets.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace commhooks {

void register_instruction_sets(py::module_& module) {
  module.def("instruction_sets", &instruction_sets, R"(
Those of this CPU that loops are compiled for, the widest last, which is the one in use.)");
  module.def("use_instruction_set", &use_instruction_set, py::arg("name"), R"(
For the whole process. For tests: all of them give the same bits, but for PowerSGD's products.)");
}

}  // namespace commhooks
