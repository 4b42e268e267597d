// Records when the reducer did what, on request.
#pragma once

#include "reducer/layout.h"
#include "shared/lock.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace commhooks {

enum class Activity {
  Backward,  // from the first gradient to the last
  Drain,     // from there until all averages are written back
  Gradient,  // an instant: a gradient has arrived
  Pack,
  Launch,  // in the call of the hook, which may do part of its work there
  Hook,    // from launch to completion
  Wait,
  Unpack,
};

// By activity.
inline constexpr const char* kActivityNames[] = {"backward", "drain", "gradient", "pack",
                                                 "launch",   "hook",  "wait",     "unpack"};

// Times are of a steady clock, which on Linux is CLOCK_MONOTONIC, the clock of `time.monotonic_ns`.
struct Span {
  using Clock = std::chrono::steady_clock;

  Activity activity;
  size_t index;  // of the parameter for Gradient, of the step for Backward and Drain, else of the
                 // bucket
  Clock::time_point start;
  Clock::time_point end;
  std::shared_ptr<const BucketLayout> layout;  // of the bucket, for Hook
  std::string hook;                            // name of the hook, for Hook
};

// Keeps spans between `start` and `stop`; otherwise a span only costs reading a flag. Thread-safe.
class Recorder {
 public:
  using Clock = Span::Clock;

  // Adds a span that lasts until the end of the scope.
  class Scope {
   public:
    Scope(Recorder& recorder, Activity activity, size_t index)
        : recorder_(recorder.is_on() ? &recorder : nullptr), activity_(activity), index_(index) {
      if (recorder_) {
        start_ = Clock::now();
      }
    }
    ~Scope() {
      if (recorder_) {
        recorder_->add({activity_, index_, start_, Clock::now()});
      }
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Recorder* recorder_;
    Activity activity_;
    size_t index_;
    Clock::time_point start_;
  };

  bool is_on() const {
    return is_on_.load(std::memory_order_relaxed);
  }
  void start() {
    Lock lock(mutex_);
    lock.replace(spans_, {});
    is_on_ = true;
  }
  // Ends the recording and returns it.
  std::vector<Span> stop() {
    const Lock lock(mutex_);
    is_on_ = false;
    return std::exchange(spans_, {});
  }

  void add(Span span) {
    if (is_on()) {
      const Lock lock(mutex_);
      if (is_on()) {
        spans_.push_back(std::move(span));
      }
    }
  }

 private:
  std::atomic<bool> is_on_{false};
  std::mutex mutex_;
  std::vector<Span> spans_;
};

}  // namespace commhooks
