// The right of one thread at a time to work on the buckets.
#pragma once

#include "shared/lock.h"

#include <thread>

namespace commhooks {

// Note [The turn]
// ~~~~~~~~~~~~~~~
// Packing, hooks, waiting and writing back take long and may call Python, so they are not done
// under a lock; instead, one thread at a time has the turn. It launches ready buckets, and when
// backward has ended it waits for all buckets and writes them back; or it drops them if the step
// has failed. Memory and futures of buckets belong to the thread that has the turn.
//   * A thread that completes a bucket while another one has the turn does not wait: before the
//     turn ends, its holder looks for buckets that have become ready.
//   * The thread that has the turn may take it again, because a hook or an observer may call a
//     method that ends the step.
//   * Threads that pack single gradients into a bucket are helpers. They have no turn: the bucket
//     is not ready before they have finished.
// `mutex` guards the holder of the turn and all other bookkeeping of the reducer.
class Turn {
  // Requires `is_open()`. Returns false if the thread had the turn before.
  bool take() {
    return std::exchange(holder_, std::this_thread::get_id()) == std::thread::id();
  }
  void give_up() {
    holder_ = {};
  }
  bool join() {
    ++helpers_;
    return true;
  }
  void leave() {
    --helpers_;
  }

 public:
  bool is_mine() const {
    return holder_ == std::this_thread::get_id();
  }
  // Whether this thread may take the turn.
  bool is_open() const {
    return is_mine() || holder_ == std::thread::id();
  }
  bool has_helpers() const {
    return helpers_ > 0;
  }

  // What a thread is from `begin` to `end`, or until it is destroyed. Both require the mutex.
  template <bool (Turn::*begin_)(), void (Turn::*end_)()>
  class Role {
   public:
    explicit Role(Turn& turn) : turn_(turn) {}
    ~Role() {
      if (has_begun_) {
        const Lock lock(turn_.mutex);
        end();
      }
    }
    Role(const Role&) = delete;
    Role& operator=(const Role&) = delete;

    void begin() {
      has_begun_ = (turn_.*begin_)();
    }
    void end() {
      if (std::exchange(has_begun_, false)) {
        (turn_.*end_)();
        turn_.changed.notify_all();
      }
    }

   private:
    Turn& turn_;
    bool has_begun_ = false;
  };

  mutable std::mutex mutex;
  std::condition_variable changed;  // the turn, the helpers, or the phase of the step

  using Holder = Role<&Turn::take, &Turn::give_up>;
  using Helper = Role<&Turn::join, &Turn::leave>;

 private:
  std::thread::id holder_;  // none if nobody has the turn
  size_t helpers_ = 0;
};

}  // namespace commhooks
