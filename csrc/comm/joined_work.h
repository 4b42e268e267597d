// Several Works as one.
#pragma once

#include "shared/lock.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <vector>

namespace commhooks {

// Completes once all of `works` have completed, with their first error; immediately if there are
// none. For point-to-point Works of Gloo, which can be waited for only once. A JoinedWork can be
// waited for several times, and releases the Works after the first time. Has no future.
class JoinedWork : public c10d::Work {
 public:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  explicit JoinedWork(Works works) : works_(std::move(works)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    Lock lock(waiting_);
    if (!isCompleted()) {
      wait_for_all(timeout);
      release(lock);
      finish(first_error_);
    }
    if (const auto error = exception()) {
      std::rethrow_exception(error);
    }
    return true;
  }

 protected:
  // Waits for all Works even after an error, as their tensors are in use until then.
  virtual void wait_for_all(std::chrono::milliseconds timeout) {
    for (const auto& work : works_) {
      attempt([&] { work->wait(timeout); });
    }
  }
  // Runs a part of `wait_for_all`, and keeps its exception if it is the first one.
  template <typename Function>
  void attempt(const Function& function) {
    try {
      function();
    } catch (const std::exception&) {
      if (!first_error_) {
        first_error_ = std::current_exception();
      }
    }
  }
  // Drops what `wait_for_all` has used, after `lock` has been released.
  virtual void release(Lock& lock) {
    lock.replace(works_, {});
  }

  Works works_;
  std::exception_ptr first_error_;

 private:
  std::mutex waiting_;
};

}  // namespace commhooks
