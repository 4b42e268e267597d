// A step of the reducer: its phase, and what belongs to it alone.
#pragma once

#include "reducer/gradient.h"
#include "reducer/layout.h"
#include "reducer/recorder.h"

#include <exception>

namespace commhooks {

// Note [Reducer states]
// ~~~~~~~~~~~~~~~~~~~~~
//
//         begin_step()          end_collecting()       finalize_backward()
//     Idle ------------> Collecting ------------> Draining ----------> Idle
//                          |    ^                    |
//                          |    | begin_step()       |
//                          |____|                    |
//                          |                         |
//                          |________ abort() ________|___> Failed ----> Idle
//
//   Idle        gradients accumulate locally (in `no_sync`, or before the first forward).
//   Collecting  a forward has announced a backward. Gradients are counted per bucket, and complete
//               buckets are handed to the hook in order. A second forward without a gradient in
//               between changes nothing.
//   Draining    the hook has all buckets. The thread that ran backward (or, with manual
//               finalization, calls finalize_backward()) waits for the results in bucket order,
//               and writes them back.
//   Failed      the step has failed. A thread waits until hooks have finished with the buckets.
//
// The names are those of BucketPipeline. Every exception leads through abort() to Idle, so that the
// next forward starts clean.
//
// Note [Abort, drain, close]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~
// Things end in three ways, which C++ and Python call by the same names:
//
//   abort   at once, because something failed: what is in flight fails, and nobody uses it
//   drain   finish what is in flight, and use it
//   close   for good: nothing can begin after it
enum class Phase { Idle, Collecting, Draining, Failed };

// The times of a step; the epoch of the clock means unknown.
struct StepTimes {
  using Clock = Span::Clock;

  Clock::time_point backward_start;
  Clock::time_point backward_end;  // the last gradient
  Clock::time_point communication_start;
  Clock::time_point communication_end;
};

// Replaced as a whole when a step begins and when it ends: nothing in it survives its step.
// The state of a bucket in this step is in Bucket::Reduction. A step begins with the forward
// that announces a backward and ends once all averages are written, which need not be inside a
// backward; so nothing here may depend on one.
struct Step {
  double scale = 1.0;  // gradients are multiplied by it before they are averaged
  GradientStore store;
  Names left_out;          // parameters of the buckets that are skipped
  size_t next_launch = 0;  // index of the first bucket that no hook has got
  size_t next_finish = 0;  // index of the first bucket that is not written back
  StepTimes times;
  std::exception_ptr observer_error;  // thrown when all averages are written
};

}  // namespace commhooks
