// Elements to copy from one place in memory to another.
#pragma once

#include <cstdint>

namespace commhooks {

// `numel` consecutive elements; if the source is null, they are zeros. Source and destination may
// be the same memory, but must not overlap otherwise.
struct Piece {
  const void* source;
  void* destination;
  int64_t numel;
};

}  // namespace commhooks
