#include "reducer/hook.h"

namespace commhooks {

FutureResult::FutureResult(c10::intrusive_ptr<c10::ivalue::Future> future)
    : future_(std::move(future)),
      completed_(std::make_shared<std::atomic<Clock::duration>>(Clock::duration::zero())) {
  future_->addCallback(
      [completed = completed_](c10::ivalue::Future&) {
        *completed = Clock::now().time_since_epoch();
      },
      /*uses_future=*/false);  // otherwise it runs on a stream that waits for the hook's
}

// An error of the device is not one of this bucket; `result` rethrows those.
void FutureResult::wait() noexcept {
  try {
    future_->wait();
  } catch (const std::exception&) {
  }
}

}  // namespace commhooks
