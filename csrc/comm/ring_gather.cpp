#include "comm/ring_gather.h"

#include <utility>

namespace commhooks {

constexpr std::chrono::milliseconds kShortest{1};

RingGather::RingGather(c10::intrusive_ptr<c10d::Backend> group, std::vector<at::Tensor> parts)
    : group_(std::move(group)),
      parts_(std::move(parts)),
      rank_(group_->getRank()),
      size_(group_->getSize()) {
  try {
    post();
  } catch (...) {
    pass_on(kShortest);  // see Note [Nothing posted is dropped] in point_to_point.py
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

bool RingGather::wait(std::chrono::milliseconds timeout) {
  Lock lock(waiting_);
  if (!isCompleted()) {
    const std::exception_ptr first_error = pass_on(timeout);
    lock.replace(sends_, {});
    lock.replace(receives_, {});
    lock.replace(parts_, {});
    lock.replace(group_, {});
    finish(first_error);
  }
  if (const auto error = exception()) {
    std::rethrow_exception(error);
  }
  return true;
}

std::exception_ptr RingGather::pass_on(std::chrono::milliseconds timeout) {
  std::exception_ptr first_error;
  // Wait for all of them even after an error: their tensors are in use until then.
  const auto attempt = [&](const auto& step) {
    try {
      step();
    } catch (const std::exception&) {
      if (!first_error) {
        first_error = std::current_exception();
      }
    }
  };
  for (int distance = 1; distance <= static_cast<int>(receives_.size()); ++distance) {
    attempt([&] { receives_[distance - 1]->wait(timeout); });
    if (!first_error && distance + 1 < size_) {
      attempt([&] { send(distance); });
    }
  }
  for (const auto& sent : sends_) {
    attempt([&] { sent->wait(timeout); });
  }
  return first_error;
}

void RingGather::send(int distance) {
  std::vector<at::Tensor> part{parts_[(rank_ - distance + size_) % size_]};
  // The tag is the distance that the part will have traveled. Parts of two gathers with different
  // tags may overtake each other; those with the same tag stay in order.
  sends_.push_back(group_->send(part, (rank_ + 1) % size_, distance + 1));
}

}  // namespace commhooks
