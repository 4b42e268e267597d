#include "comm/ring_gather.h"

#include <utility>

namespace commhooks {

constexpr std::chrono::milliseconds kShortest{1};

RingGather::RingGather(c10::intrusive_ptr<c10d::Backend> group, std::vector<at::Tensor> parts)
    : JoinedWork({}),
      group_(std::move(group)),
      parts_(std::move(parts)),
      rank_(group_->getRank()),
      size_(group_->getSize()) {
  try {
    post();
  } catch (...) {
    RingGather::wait_for_all(kShortest);  // Note [Nothing posted is dropped] in point_to_point.py
    throw;
  }
}

void RingGather::post() {
  for (int distance = 1; distance < size_; ++distance) {
    std::vector<at::Tensor> part{parts_[(rank_ - distance + size_) % size_]};
    receives_.push_back(group_->recv(part, (rank_ - 1 + size_) % size_, distance));
  }
  if (size_ > 1) {
    send(0);
  }
}

void RingGather::wait_for_all(std::chrono::milliseconds timeout) {
  for (int distance = 1; distance <= static_cast<int>(receives_.size()); ++distance) {
    attempt([&] { receives_[distance - 1]->wait(timeout); });
    if (!first_error_ && distance + 1 < size_) {
      attempt([&] { send(distance); });
    }
  }
  JoinedWork::wait_for_all(timeout);
}

void RingGather::release(Lock& lock) {
  JoinedWork::release(lock);
  lock.replace(receives_, {});
  lock.replace(parts_, {});
  lock.replace(group_, {});
}

void RingGather::send(int distance) {
  std::vector<at::Tensor> part{parts_[(rank_ - distance + size_) % size_]};
  // The tag is the distance that the part will have traveled. Parts of two gathers with different
  // tags may overtake each other; those with the same tag stay in order.
  works_.push_back(group_->send(part, (rank_ + 1) % size_, distance + 1));
}

}  // namespace commhooks
