#include "bindings/reducer/python_hook.h"

#include "reducer/grad_bucket.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

namespace py = pybind11;

namespace commhooks {
namespace {

// Autograd only passes a Python exception from its threads to the caller of backward as a
// `python_error`. Requires the GIL.
[[noreturn]] void throw_python_error(py::error_already_set& error) {
  error.restore();
  python_error persisted;
  persisted.persist();
  throw std::move(persisted);
}

void add_note(py::error_already_set& error, const GradBucket& bucket) {
  error.value().attr("add_note")(c10::str(
      "Raised in the communication hook of bucket ", bucket.getIndex(), " (",
      bucket.layout().describe(), ") at step ", bucket.step(), "."));
}

// Returns `run()`, with a note that names the bucket on its exception. Requires the GIL.
template <typename Run>
auto for_bucket(const GradBucket& bucket, const Run& run) {
  try {
    try {
      return run();
    } catch (py::builtin_exception& exception) {
      exception.set_error();
      throw py::error_already_set();
    }
  } catch (py::error_already_set& error) {
    add_note(error, bucket);
    throw_python_error(error);
  }
}

std::string name_of(const py::object& function) {
  for (const char* attribute : {"name", "__qualname__"}) {
    const py::object name = py::getattr(function, attribute, py::none());
    if (py::isinstance<py::str>(name)) {
      return name.cast<std::string>();
    }
  }
  return py::str(py::type::of(function).attr("__qualname__"));
}

// Returns whether Python objects can be released. A thread that asks for the GIL during the
// shutdown of the interpreter is terminated, which in a destructor terminates the process.
bool can_release() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

// Owns what refers to Python objects, and may be dropped by any thread, without the GIL.
template <typename T>
std::shared_ptr<T> droppable(T value) {
  return std::shared_ptr<T>(new T(std::move(value)), [](T* owned) {
    if (can_release()) {
      py::gil_scoped_acquire gil;
      delete owned;
    }
  });
}

// A Python future, and the bucket that is named in a note on its exception.
class PythonResult final : public FutureResult {
 public:
  PythonResult(
      std::shared_ptr<torch::jit::PythonFutureWrapper> wrapper,
      std::shared_ptr<const GradBucket> bucket)
      : FutureResult(wrapper->fut),
        wrapper_(droppable(std::move(wrapper))),
        bucket_(std::move(bucket)) {}

  at::Tensor result() override {
    py::gil_scoped_acquire gil;
    return for_bucket(*bucket_, [&] {
      const py::object value = (*wrapper_)->value();
      if (!THPVariable_Check(value.ptr())) {
        throw py::type_error(
            c10::str(
                "Expected the future that a communication hook returns to have one tensor, found ",
                py::repr(py::type::of(value)).cast<std::string>(),
                ". `Work.get_future()` has a list of tensors: add `.then(lambda f: "
                "f.value()[0])`."));
      }
      return at::Tensor(THPVariable_Unpack(value.ptr()));
    });
  }

 private:
  std::shared_ptr<std::shared_ptr<torch::jit::PythonFutureWrapper>> wrapper_;
  std::shared_ptr<const GradBucket> bucket_;
};

}  // namespace

PythonHook::PythonHook(py::object function)
    : function_(droppable(std::move(function))), name_(name_of(*function_)) {
  const auto is_true = [&](const char* name) {
    return py::getattr(*function_, name, py::none()).is(py::handle(Py_True));
  };
  format_.checks_finite = is_true("checks_finite");
  fails_everywhere_ = is_true("fails_everywhere");
}

std::unique_ptr<PendingResult> PythonHook::run(const std::shared_ptr<GradBucket>& bucket) {
  py::gil_scoped_acquire gil;
  return for_bucket(*bucket, [&] {
    const py::object answer = (*function_)(bucket);
    if (!py::isinstance<torch::jit::PythonFutureWrapper>(answer)) {
      const std::string found = py::repr(py::type::of(answer)).cast<std::string>();
      PyErr_Format(
          PyExc_RuntimeError,  // as in torch
          "Expected the communication hook to return a torch.futures.Future, found %s.",
          found.c_str());
      throw py::error_already_set();
    }
    return std::make_unique<PythonResult>(
        answer.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>(), bucket);
  });
}

void PythonHook::abort(bool has_run) {
  if (!can_release()) {
    return;
  }
  py::gil_scoped_acquire gil;
  if (py::hasattr(*function_, "abort")) {
    try {
      function_->attr("abort")(has_run);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("abort() of a communication hook");
    }
  }
}

std::function<void(const std::vector<size_t>&)> python_observer(py::object function) {
  return [shared = droppable(std::move(function))](const std::vector<size_t>& indices) {
    py::gil_scoped_acquire gil;
    try {
      (*shared)(indices);
    } catch (py::error_already_set& error) {
      throw_python_error(error);
    }
  };
}

}  // namespace commhooks
