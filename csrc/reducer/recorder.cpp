#include "reducer/recorder.h"

#include <utility>

namespace commhooks {

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
