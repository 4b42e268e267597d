#include "reducer/native_hooks.h"

#include <typeinfo>

namespace commhooks {
namespace {

// The result of an in-place collective.
class InPlaceResult final : public FutureResult {
 public:
  // A collective that is enqueued counts as complete, and is asked for no future: the one of nccl2
  // makes the current stream wait at once, which would be that of backward.
  InPlaceResult(c10::intrusive_ptr<c10d::Work> work, at::Tensor buffer, bool is_enqueued)
      : FutureResult(is_enqueued ? nullptr : work->getFuture()),
        work_(std::move(work)),
        buffer_(std::move(buffer)) {}

  at::Tensor result() override {
    // The collective has completed, so this rethrows its error, or makes the current stream wait
    // for the stream of the collective. A future of Gloo only synchronizes with the default stream.
    work_->wait();
    return buffer_;
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  at::Tensor buffer_;
};

// A group that is written in Python may do more than its backend.
bool is_torchs(const c10d::ProcessGroup& group) {
  return typeid(group) == typeid(c10d::ProcessGroup);
}

bool is_enqueued(c10d::ProcessGroup& group, const at::Tensor& tensor) {
  return tensor.is_cuda() && is_torchs(group) &&
      group.getBackend(tensor.device().type())->getBackendName().starts_with("nccl");
}

}  // namespace

AverageHook::AverageHook(
    c10::intrusive_ptr<c10d::ProcessGroup> process_group,
    std::optional<c10::ScalarType> wire_dtype,
    std::string name)
    : process_group_(std::move(process_group)), wire_dtype_(wire_dtype), name_(std::move(name)) {}

PackFormat AverageHook::format() const {
  // Dividing first keeps the sum inside the range of half precision.
  return {
      .dtype = wire_dtype_,
      .scale = 1.0 / process_group_->getSize(),
      .keeps_views = transport_ != nullptr};
}

bool AverageHook::passes_through() const {
  return process_group_->getSize() == 1 && is_torchs(*process_group_);
}

std::unique_ptr<PendingResult> AverageHook::run(const std::shared_ptr<GradBucket>& bucket) {
  std::vector<at::Tensor> tensors = {bucket->getBuffer()};
  if (transport_) {
    const auto wire_dtype = wire_dtype_.value_or(tensors.front().scalar_type());
    // Read each time: users may change it.
    const auto timeout = process_group_->getBackend(c10::kCPU)->getBackendOptions()->timeout;
    return transport_->average(tensors.front(), wire_dtype, bucket->getIndex(), timeout);
  }
  return std::make_unique<InPlaceResult>(
      process_group_->allreduce(tensors), tensors.front(),
      is_enqueued(*process_group_, tensors.front()));
}

void AverageHook::use_transport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
    std::shared_ptr<Transport> transport) {
  transport_ = process_group == process_group_ ? std::move(transport) : nullptr;
}

std::unique_ptr<PendingResult> NoopHook::run(const std::shared_ptr<GradBucket>& /*bucket*/) {
  TORCH_INTERNAL_ASSERT(false, "NoopHook passes through, so it is never run.");
}

}  // namespace commhooks
