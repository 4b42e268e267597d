#include "bindings/reducer/register.h"
#include "reducer/native_hooks.h"

namespace py = pybind11;

namespace commhooks {

void register_native_hooks(py::module_& module) {
  py::class_<Hook, std::shared_ptr<Hook>>(
      module, "NativeHook", "A communication hook that runs in C++ and never takes the GIL.");

  py::class_<AverageHook, Hook, std::shared_ptr<AverageHook>>(module, "AverageHook", R"(
The average by one all-reduce on `process_group`, in `wire_dtype` (`None`: that of the gradients).)")
      .def(
          py::init<c10::intrusive_ptr<c10d::ProcessGroup>, std::optional<c10::ScalarType>>(),
          py::arg("process_group"), py::arg("wire_dtype") = py::none());

  py::class_<NoopHook, Hook, std::shared_ptr<NoopHook>>(
      module, "NoopHook", "Sends nothing; every rank keeps its own gradients.")
      .def(py::init<>());
}

}  // namespace commhooks
