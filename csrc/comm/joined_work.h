// Several Works as one.
#pragma once

#include "shared/lock.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <vector>

namespace commhooks {

// Completes once all of `works` have completed, with their first error; immediately if there are
// none. For point-to-point Works of Gloo, which can be waited for only once. A JoinedWork can be
// waited for several times, and releases the Works after the first time. Has no future.
class JoinedWork : public c10d::Work {
 public:
  explicit JoinedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works);

  bool wait(std::chrono::milliseconds timeout) override;

 private:
  std::mutex waiting_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace commhooks
