// Which thread works on the buckets.
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
// Guarded by the mutex of the reducer.
class Turn {
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

  // Until it is destroyed, the thread has the turn if it has called `take`.
  class Holder {
   public:
    Holder(Turn& turn, std::mutex& mutex) : turn_(turn), mutex_(mutex) {}
    ~Holder() {
      if (has_taken_) {
        const Lock lock(mutex_);
        give_up();
      }
    }
    Holder(const Holder&) = delete;
    Holder& operator=(const Holder&) = delete;

    // Requires the mutex and `is_open()`.
    void take() {
      has_taken_ = !turn_.is_mine();
      turn_.holder_ = std::this_thread::get_id();
    }
    // Requires the mutex. Does nothing if the thread had the turn before.
    void give_up() {
      if (std::exchange(has_taken_, false)) {
        turn_.holder_ = {};
        turn_.changed.notify_all();
      }
    }

   private:
    Turn& turn_;
    std::mutex& mutex_;
    bool has_taken_ = false;
  };

  // Until it is destroyed, the thread is a helper if it has called `begin`.
  class Helper {
   public:
    Helper(Turn& turn, std::mutex& mutex) : turn_(turn), mutex_(mutex) {}
    ~Helper() {
      if (is_helping_) {
        const Lock lock(mutex_);
        end();
      }
    }
    Helper(const Helper&) = delete;
    Helper& operator=(const Helper&) = delete;

    // Both require the mutex.
    void begin() {
      is_helping_ = true;
      ++turn_.helpers_;
    }
    void end() {
      is_helping_ = false;
      --turn_.helpers_;
      turn_.changed.notify_all();
    }

   private:
    Turn& turn_;
    std::mutex& mutex_;
    bool is_helping_ = false;
  };

  std::condition_variable changed;  // the turn, the helpers, or the phase of the step

 private:
  std::thread::id holder_;  // none if nobody has the turn
  size_t helpers_ = 0;
};

}  // namespace commhooks
