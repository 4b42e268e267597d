#include "bindings/python_hook.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

namespace py = pybind11;

namespace commhooks {
namespace {

// Autograd carries `python_error`, and no other type, from its threads to the caller of backward with
// the Python exception intact. Needs the GIL.
[[noreturn]] void throw_python_error(py::error_already_set& error) {
  error.restore();
  python_error persisted;
  persisted.persist();
  throw std::move(persisted);
}

void add_note(py::error_already_set& error, const BucketCall& call) {
  if (!py::hasattr(error.value(), "add_note")) {
    return;
  }
  const auto& names = call.layout->names;
  error.value().attr("add_note")(c10::str(
      "Raised in the communication hook of bucket ", call.index, " (parameters ", names.front(),
      names.size() > 1 ? c10::str(" ... ", names.back()) : std::string(), ") at step ", call.step,
      "."));
}

// A Python future, and what the exception of a failing one is annotated with.
class PythonResult final : public PendingResult {
 public:
  PythonResult(std::shared_ptr<torch::jit::PythonFutureWrapper> wrapper, BucketCall call)
      : wrapper_(std::move(wrapper)), call_(std::move(call)) {}

  ~PythonResult() override {
    py::gil_scoped_acquire gil;
    wrapper_.reset();
  }

  c10::ivalue::Future& future() override {
    return *wrapper_->fut;
  }

  at::Tensor result() override {
    py::gil_scoped_acquire gil;
    try {
      const py::object value = wrapper_->value();
      if (!THPVariable_Check(value.ptr())) {
        throw py::type_error(
            c10::str(
                "Expected the future that a communication hook returns to hold one tensor, found ",
                py::repr(py::type::of(value)).cast<std::string>(),
                ". `Work.get_future()` holds a list of tensors: add `.then(lambda f: "
                "f.value()[0])`."));
      }
      return THPVariable_Unpack(value.ptr());
    } catch (py::error_already_set& error) {
      add_note(error, call_);
      throw_python_error(error);
    } catch (py::builtin_exception& exception) {
      exception.set_error();
      py::error_already_set error;
      add_note(error, call_);
      throw_python_error(error);
    }
  }

 private:
  std::shared_ptr<torch::jit::PythonFutureWrapper> wrapper_;
  BucketCall call_;
};

}  // namespace

PythonHook::PythonHook(py::object function) : function_(std::move(function)) {}

PythonHook::~PythonHook() {
  if (!Py_IsInitialized()) {
    function_.release();  // nothing is left to give it back to
    return;
  }
  py::gil_scoped_acquire gil;
  function_ = py::object();
}

std::unique_ptr<PendingResult> PythonHook::run(const BucketCall& call) {
  py::gil_scoped_acquire gil;
  try {
    auto bucket = std::make_shared<GradBucket>(
        call.layout, call.buffer, call.index, call.bucket_count, call.step);
    const py::object answer = function_(std::move(bucket));
    if (!py::isinstance<torch::jit::PythonFutureWrapper>(answer)) {
      throw py::type_error(
          c10::str(
              "Expected the communication hook to return a torch.futures.Future, found ",
              py::repr(py::type::of(answer)).cast<std::string>(), "."));
    }
    return std::make_unique<PythonResult>(
        answer.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>(), call);
  } catch (py::error_already_set& error) {
    add_note(error, call);
    throw_python_error(error);
  } catch (py::builtin_exception& exception) {
    exception.set_error();
    py::error_already_set error;
    add_note(error, call);
    throw_python_error(error);
  }
}

void PythonHook::abandon() {
  py::gil_scoped_acquire gil;
  if (py::hasattr(function_, "abandon")) {
    try {
      function_.attr("abandon")();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("the abandon() of a communication hook");
    }
  }
}

}  // namespace commhooks
