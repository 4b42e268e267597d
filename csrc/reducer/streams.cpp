#include "reducer/streams.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace commhooks {

void StreamTrail::add_current(c10::Device device) {
  if (device.is_cpu()) {
    return;
  }
  const c10::Stream current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (std::find(streams_.begin(), streams_.end(), current) == streams_.end()) {
    streams_.push_back(current);
  }
}

bool StreamTrail::join(c10::Device device) {
  if (device.is_cpu()) {
    return false;
  }
  const c10::Stream current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  bool others = false;
  for (const c10::Stream& stream : streams_) {
    if (stream != current) {
      c10::Event event(device.type());
      event.record(stream);
      event.block(current);
      others = true;
    }
  }
  streams_.assign(1, current);
  return others;
}

std::optional<c10::Stream> side_stream(c10::Device device) {
  if (device.is_cpu()) {
    return std::nullopt;
  }
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

void record_on_current_stream(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  if (device.is_cpu()) {
    return;
  }
  if (tensor.is_sparse()) {
    record_on_current_stream(tensor._indices());
    record_on_current_stream(tensor._values());
  } else {
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.recordDataPtrOnStream(tensor.storage().data_ptr(), guard.getStream(device));
  }
}

}  // namespace commhooks
