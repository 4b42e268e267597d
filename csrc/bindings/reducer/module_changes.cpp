#include "bindings/reducer/register.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

namespace py = pybind11;

namespace commhooks {
namespace {

#if PY_VERSION_HEX < 0x030E0000
// Python numbers the changes of all dictionaries, so that the last one has the greatest number.
uint64_t last_change(const py::list& dicts) {
  uint64_t last = 0;
  for (const py::handle dict : dicts) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    last = std::max(last, reinterpret_cast<PyDictObject*>(dict.ptr())->ma_version_tag);
#pragma GCC diagnostic pop
  }
  return last;
}
#else
// Python has no such numbers any longer: always another result, as after a change.
uint64_t last_change(const py::list& /*dicts*/) {
  static uint64_t last = 0;
  return ++last;
}
#endif

bool any_requires_grad(const py::list& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const py::handle tensor) {
    return THPVariable_Unpack(tensor.ptr()).requires_grad();
  });
}

}  // namespace

void register_module_changes(py::module_& module) {
  module.def("last_change", &last_change, py::arg("dicts"), R"(
Return a number that becomes another one if any of these dictionaries changes.)");
  module.def(
      "any_requires_grad", &any_requires_grad, py::arg("tensors"),
      "Return whether any of these tensors requires a gradient.");
}

}  // namespace commhooks
