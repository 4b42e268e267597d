// What belongs to one step of the reducer.
#pragma once

#include "reducer/gradient.h"
#include "reducer/layout.h"
#include "reducer/recorder.h"

#include <memory>
#include <vector>

namespace commhooks {

// Where the time of a step went; the epoch of the clock means unknown.
struct StepTimes {
  using Clock = Span::Clock;

  Clock::time_point backward_start;
  Clock::time_point backward_end;  // the last gradient
  Clock::time_point communication_start;
  Clock::time_point communication_end;
};

// Replaced as a whole when a step begins and when it ends: nothing in it survives its step.
// Anything that belongs to a bucket in this step is in Bucket::Exchange. A step begins with the
// forward that announces a backward and ends once all averages are written, which need not be
// inside a backward; so nothing here may depend on one. The phase of the step is in StepState.
struct Step {
  double scale = 1.0;  // gradients are multiplied by it before they are averaged
  std::shared_ptr<const GradientStore> store = local_gradients();
  std::vector<size_t> absent;  // parameters that will get no gradient, until they count as arrived
  Names left_out;              // parameters of the buckets that are skipped
  size_t next_launch = 0;      // index of the first bucket that no hook has got
  size_t next_finish = 0;      // index of the first bucket that is not written back
  StepTimes times;
};

}  // namespace commhooks
