// The tensors of all ranks of a Gloo group, by messages to the next rank.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <mutex>
#include <vector>

namespace commhooks {

// An all-gather around a ring: in each of N-1 rounds a rank passes on to the next one what came from
// the one before. A node of several ranks so receives each part once.
//
// All receives are posted at once, which is what Gloo's own does not: see Note [Receives first] in
// point_to_point.py. Parts are passed on by whoever waits, so somebody has to. Has no future. Holds the
// group until it has completed.
class RingGather : public c10d::Work {
 public:
  // parts: one per rank, of CPU memory, equally long; this rank's is filled.
  RingGather(c10::intrusive_ptr<c10d::Backend> group, std::vector<at::Tensor> parts);

  bool wait(std::chrono::milliseconds timeout) override;

 private:
  void post();
  std::exception_ptr pass_on(std::chrono::milliseconds timeout);
  void send(int distance);  // the part of the rank so far behind this one

  std::mutex waiting_;
  c10::intrusive_ptr<c10d::Backend> group_;
  std::vector<at::Tensor> parts_;
  int rank_;
  int size_;
  std::vector<c10::intrusive_ptr<c10d::Work>>
      receives_;  // of the parts of ranks -1, -2, ... of this one
  std::vector<c10::intrusive_ptr<c10d::Work>> sends_;
};

}  // namespace commhooks
