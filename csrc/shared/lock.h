// A lock under which nothing is destroyed.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

namespace commhooks {

// Note [Locks and the GIL]
// ~~~~~~~~~~~~~~~~~~~~~~~~
// Destroying a tensor may take the GIL, because a tensor that Python has seen owns a Python object.
// If a thread does so under a lock that the thread with the GIL waits for, both wait forever. And
// what Python then runs, such as a `__del__`, may ask for the lock that its own thread holds.
// Two rules hold for every Lock. Each one alone prevents the first case:
//   1. Under a lock nothing is destroyed that may own a tensor, a Python object or a process group,
//      and nothing is called that may call Python, such as methods of process groups. What remains
//      is bookkeeping: numbers, and pointers that are copied or swapped. Former values leave the
//      lock through `Lock::replace` before they are destroyed.
//   2. No lock is waited for with the GIL held: bindings of functions that lock release the GIL.
// Nothing slow, and nothing that calls Python, runs under a lock: see Note [The turn] in
// reducer/turn.h. A HostGroup alone computes under its lock, and a JoinedWork waits for peers under
// a mutex of its own, both without the GIL.
class Lock {
 public:
  explicit Lock(std::mutex& mutex) : lock_(mutex, std::defer_lock) {
    if (has_gil && has_gil()) {
      ++taken_with_gil;  // a test fails
    }
    lock_.lock();
  }

  // Puts `value` in `place`. The former value is destroyed after the mutex has been released.
  template <typename T>
  void replace(T& place, std::type_identity_t<T> value) {
    former_.push_back(std::make_shared<T>(std::exchange(place, std::move(value))));
  }

  // Calls `function` without the mutex.
  template <typename Function>
  void without(Function function) {
    lock_.unlock();
    function();
    lock_.lock();
  }
  // Releases the mutex until `condition` holds.
  template <typename Condition>
  void wait(std::condition_variable& changed, Condition condition) {
    changed.wait(lock_, condition);
  }
  // The same until `timeout` has passed; returns whether the condition holds.
  template <typename Timeout, typename Condition>
  bool wait_for(std::condition_variable& changed, Timeout timeout, Condition condition) {
    return changed.wait_for(lock_, timeout, condition);
  }

  // Set once, by the bindings: this folder cannot see Python.
  inline static int (*has_gil)() = nullptr;
  inline static std::atomic<int64_t> taken_with_gil{0};

 private:
  std::vector<std::shared_ptr<void>> former_;  // before `lock_`, hence destroyed after it
  std::unique_lock<std::mutex> lock_;
};

}  // namespace commhooks
