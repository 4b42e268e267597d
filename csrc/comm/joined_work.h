// Several Works as one.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <mutex>
#include <vector>

namespace commhooks {

// Completes once all of `works` have, with the first error among them; at once if there are none.
// For point-to-point Works of Gloo, which can be waited for only once; this one can be waited for
// again and again, and lets go of them after the first time. Has no future.
class JoinedWork : public c10d::Work {
 public:
  explicit JoinedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works);

  bool wait(std::chrono::milliseconds timeout) override;

 private:
  std::mutex waiting_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace commhooks
