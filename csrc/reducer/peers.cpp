#include "reducer/peers.h"

namespace commhooks {
namespace {

PeerErrorThrower peer_error_thrower = nullptr;

}  // namespace

void set_peer_error_thrower(PeerErrorThrower thrower) {
  peer_error_thrower = thrower;
}

void throw_peer_error(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& what) {
  if (peer_error_thrower) {
    peer_error_thrower(group, what);
  }
  throw;
}

}  // namespace commhooks
