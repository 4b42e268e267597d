#include "comm/joined_work.h"

#include <utility>

namespace commhooks {

JoinedWork::JoinedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works)
    : works_(std::move(works)) {}

bool JoinedWork::wait(std::chrono::milliseconds timeout) {
  Lock lock(waiting_);
  if (!isCompleted()) {
    std::exception_ptr first_error;
    // Wait for all of them even after an error: their tensors are in use until then.
    for (const auto& work : works_) {
      try {
        work->wait(timeout);
      } catch (const std::exception&) {
        if (!first_error) {
          first_error = std::current_exception();
        }
      }
    }
    lock.replace(works_, {});
    finish(first_error);
  }
  if (const auto error = exception()) {
    std::rethrow_exception(error);
  }
  return true;
}

}  // namespace commhooks
