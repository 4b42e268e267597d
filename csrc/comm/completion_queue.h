// Lets one thread wait for many collectives.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

namespace commhooks {

// A queue of integer tokens. A token is put directly, or watched for: it arrives when a Work has
// completed, with or without an error (ask the Work). Threads that complete Works only push an
// integer: they never need the GIL, and never run a hook's code.
class CompletionQueue {
 public:
  CompletionQueue();
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;
  ~CompletionQueue();

  void put(int64_t token);

  // Point-to-point Works of Gloo have no future; these are waited for, in the order in which they come,
  // by a helper thread for each stage.
  void watch(const c10::intrusive_ptr<c10d::Work>& work, int64_t token, int64_t stage);

  // Blocks until a token is there or `timeout` has passed; no timeout: for as long as it takes.
  std::optional<int64_t> get(std::optional<std::chrono::duration<double>> timeout);

 private:
  struct Tokens;
  struct Waiter;
  std::shared_ptr<Tokens> tokens_;
  std::map<int64_t, std::unique_ptr<Waiter>> waiters_;  // by stage
  std::mutex waiters_mutex_;
};

}  // namespace commhooks
