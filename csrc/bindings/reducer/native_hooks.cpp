#include "reducer/native_hooks.h"
#include "bindings/reducer/register.h"

namespace py = pybind11;

namespace commhooks {

void register_native_hooks(py::module_& module) {
  py::class_<Hook, std::shared_ptr<Hook>>(
      module, "NativeHook", "A communication hook that runs in C++ without the GIL.");

  py::class_<AverageHook, Hook, std::shared_ptr<AverageHook>>(module, "AverageHook", R"(
Average by one all-reduce on `process_group`, in `wire_dtype` (None: the dtype of the gradients).)")
      .def(
          py::init<c10::intrusive_ptr<c10d::ProcessGroup>, std::optional<c10::ScalarType>>(),
          py::arg("process_group"), py::arg("wire_dtype") = py::none());

  py::class_<NoopHook, Hook, std::shared_ptr<NoopHook>>(
      module, "NoopHook", "Send nothing; every rank keeps its own gradients.")
      .def(py::init<>());
}

}  // namespace commhooks
