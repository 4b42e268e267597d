// The right of one thread at a time to work on the buckets.
#pragma once

#include "shared/lock.h"

#include <thread>

namespace commhooks {

// Note [The turn]
// ~~~~~~~~~~~~~~~
// Packing, hooks, waiting and writing back take long and may call Python, so they are not done
// under a lock; instead, one thread at a time has the turn. It launches ready buckets, and when
// backward has ended it drains them: it waits for all buckets and writes them back. If the step
// has failed, it aborts it. Memory and futures of buckets belong to the thread that has the turn.
//   * A thread that completes a bucket while another one has the turn does not wait: before the
//     turn ends, its holder looks for buckets that have become ready.
//   * The thread that has the turn may take it again, because a hook or an observer may call a
//     method that ends the step.
//   * Threads that pack single gradients into a bucket are helpers. They have no turn: the bucket
//     is not ready before they have finished.
// `mutex` guards the holder of the turn and all other bookkeeping of the reducer.
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

  // Has the turn, or is a helper, until `end`, or until it is destroyed. The methods require the
  // mutex.
  class Hold {
   public:
    explicit Hold(Turn& turn) : turn_(turn) {}
    ~Hold() {
      if (is_holder_ || is_helper_) {
        const Lock lock(turn_.mutex);
        end();
      }
    }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

    // Requires `is_open()`. Has no effect if the thread has the turn already.
    void take() {
      is_holder_ |= !turn_.is_mine();
      turn_.holder_ = std::this_thread::get_id();
    }
    void help() {
      is_helper_ = true;
      ++turn_.helpers_;
    }
    void end() {
      if (std::exchange(is_holder_, false)) {
        turn_.holder_ = {};
      }
      turn_.helpers_ -= std::exchange(is_helper_, false);
      turn_.changed.notify_all();
    }

   private:
    Turn& turn_;
    bool is_holder_ = false;
    bool is_helper_ = false;
  };

  mutable std::mutex mutex;
  std::condition_variable changed;  // the turn, the helpers, or the phase of the step

 private:
  std::thread::id holder_;  // none if nobody has the turn
  size_t helpers_ = 0;
};

}  // namespace commhooks
