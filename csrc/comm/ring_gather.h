// An all-gather over Gloo by messages to the next rank.
#pragma once

#include "comm/joined_work.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <vector>

namespace commhooks {

// An all-gather around a ring: in each of N-1 rounds a rank sends to the next rank the part that it
// received from the rank before. A node of several ranks therefore receives each part once.
//
// Unlike Gloo's own all-gather, this one posts all receives first: see Note [Receives first] in
// point_to_point.py. The thread that waits passes the parts on, so some thread has to wait. Owns a
// reference to the group until it has completed. Its Works, as a JoinedWork, are what it sends.
class RingGather : public JoinedWork {
 public:
  // parts: one CPU tensor per rank, of equal length; the part of this rank is the input.
  RingGather(c10::intrusive_ptr<c10d::Backend> group, std::vector<at::Tensor> parts);

 private:
  void wait_for_all(std::chrono::milliseconds timeout) override;
  void release(Lock& lock) override;
  void post();
  void send(int distance);  // sends the part of the rank that is `distance` before this one

  c10::intrusive_ptr<c10d::Backend> group_;
  std::vector<at::Tensor> parts_;
  int rank_;
  int size_;
  Works receives_;  // parts of the ranks 1, 2, ... before
};

}  // namespace commhooks
