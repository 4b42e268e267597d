// The state of a thread that collectives take with them.
#pragma once

#include <ATen/ThreadLocalPythonObjects.h>

#include <utility>

namespace commhooks {

// Hides the Python objects in this thread's state while collectives are issued. A Work keeps that
// state, and backward puts its context there. The thread of Gloo that drops the last reference
// needs the GIL for it, and ends the process with SIGABRT if the interpreter is finalizing.
class WithoutPythonObjects {
 public:
  WithoutPythonObjects() : hidden_(at::impl::ThreadLocalPythonObjects::get_state()) {
    at::impl::ThreadLocalPythonObjects::set_state({});
  }
  ~WithoutPythonObjects() {
    at::impl::ThreadLocalPythonObjects::set_state(std::move(hidden_));
  }
  WithoutPythonObjects(const WithoutPythonObjects&) = delete;
  WithoutPythonObjects& operator=(const WithoutPythonObjects&) = delete;

 private:
  at::impl::ThreadLocalPythonObjects hidden_;
};

}  // namespace commhooks
