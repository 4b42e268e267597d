// The one state of the reducer.
#pragma once

#include <c10/util/Exception.h>

namespace commhooks {

// Note [Reducer states]
// ~~~~~~~~~~~~~~~~~~~~~
//
//            expect()                 drain()               finish()
//     Idle ------------> Collecting ------------> Draining ----------> Idle
//                          |    ^                    |
//                          |    | expect()           |
//                          |____|                    |
//                          |                         |
//                          |________ abandon() ______|_______________> Idle
//
//   Idle        gradients accumulate locally (`no_sync`, or no forward yet).
//   Collecting  a forward has announced a backward: gradients count their buckets down, and every
//               bucket whose turn it is goes to the hook. A second forward without a gradient in
//               between changes nothing.
//   Draining    all buckets are with the hook; the thread that ran backward (or, with manual
//               finalization, finalize_backward()) waits for the results, in bucket order, and writes
//               them back.
//
// An exception anywhere leads through abandon() to Idle: the next forward starts clean.
enum class Phase { Idle, Collecting, Draining };

class StepState {
 public:
  Phase phase() const {
    return phase_;
  }
  bool collecting() const {
    return phase_ == Phase::Collecting;
  }

  void expect() {
    TORCH_CHECK(
        phase_ != Phase::Draining,
        "The last backward has not been finished: call finalize_backward() after each, as manual "
        "finalization asks.");
    phase_ = Phase::Collecting;
  }
  void drain() {
    TORCH_INTERNAL_ASSERT(phase_ == Phase::Collecting);
    phase_ = Phase::Draining;
  }
  void finish() {
    TORCH_INTERNAL_ASSERT(phase_ == Phase::Draining);
    phase_ = Phase::Idle;
  }
  void abandon() {
    phase_ = Phase::Idle;
  }

 private:
  Phase phase_ = Phase::Idle;
};

}  // namespace commhooks
