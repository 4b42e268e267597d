// Errors of collectives that fail because a peer is lost.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>
#include <utility>

namespace commhooks {

// Called in a `catch` block. Throws the error that the exception under way means to users. `what`
// was under way in `group`. Set once, by the bindings: the error is one of Python.
inline void (*throw_peer_error)(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& what) = nullptr;

// Returns `run()`, which starts a collective of `group` or waits for it. See Note [Lost peers] in
// reducer/peers.py. `what` is called to describe the collective if it fails.
template <typename What, typename Run>
auto with_peers(const c10::intrusive_ptr<c10d::ProcessGroup>& group, What&& what, Run&& run) {
  try {
    return std::forward<Run>(run)();
  } catch (...) {
    if (throw_peer_error) {
      throw_peer_error(group, std::forward<What>(what)());
    }
    throw;
  }
}

}  // namespace commhooks
