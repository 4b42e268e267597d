#include "reducer/recorder.h"

#include <utility>

namespace commhooks {

const char* name_of(Activity activity) {
  switch (activity) {
    case Activity::Backward:
      return "backward";
    case Activity::Drain:
      return "drain";
    case Activity::Gradient:
      return "gradient";
    case Activity::Pack:
      return "pack";
    case Activity::Launch:
      return "launch";
    case Activity::Hook:
      return "hook";
    case Activity::Wait:
      return "wait";
    case Activity::Unpack:
      return "unpack";
  }
  return "";
}

void Recorder::start() {
  Lock lock(mutex_);
  lock.replace(spans_, {});
  is_on_ = true;
}

std::vector<Span> Recorder::stop() {
  const Lock lock(mutex_);
  is_on_ = false;
  return std::exchange(spans_, {});
}

void Recorder::add(Span span) {
  if (!is_on()) {
    return;
  }
  const Lock lock(mutex_);
  if (is_on()) {
    spans_.push_back(std::move(span));
  }
}

}  // namespace commhooks
