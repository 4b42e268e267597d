// A queue on which one thread waits for many collectives.
#pragma once

#include "shared/lock.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <thread>

namespace commhooks {

// A queue of integer tokens. A token is appended directly, or once a Work has completed, with or
// without an error (which the Work has). Threads that complete Works only append an integer: they
// never need the GIL, and never run code of a hook.
class CompletionQueue {
 public:
  CompletionQueue();
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;
  ~CompletionQueue();

  void put(int64_t token);

  // Point-to-point Works of Gloo have no future; one thread per stage waits for them, in the order
  // of the calls.
  void watch(const c10::intrusive_ptr<c10d::Work>& work, int64_t token, int64_t stage);

  // Leaves what threads wait for to them, and all other Works to new threads.
  void forget();

  // Waits for a token, or until `timeout` has passed, if there is one.
  std::optional<int64_t> get(std::optional<std::chrono::duration<double>> timeout);

 private:
  struct Tokens;
  struct Waiter;
  std::shared_ptr<Tokens> tokens_;
  std::map<int64_t, std::unique_ptr<Waiter>> waiters_;  // by stage
  std::mutex waiters_mutex_;
};

}  // namespace commhooks
