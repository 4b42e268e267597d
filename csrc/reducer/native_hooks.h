// Hooks that never take the GIL.
#pragma once

#include "reducer/hook.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace commhooks {

// Averages by one all-reduce, which the backend may overlap with backward. With a wire dtype
// gradients are divided by the number of ranks in fp32 and cast while they are packed, and cast
// back while they are unpacked; the sum is computed in the wire dtype. Where gradients are views of
// memory that ranks share, they are cast while they are summed instead. Of sparse gradients, the
// average has all rows that any rank has.
class AverageHook final : public Hook {
 public:
  AverageHook(
      c10::intrusive_ptr<c10d::ProcessGroup> process_group,
      std::optional<c10::ScalarType> wire_dtype,
      std::string name = "average");

  std::string name() const override {
    return name_;
  }
  PackFormat format() const override;
  bool passes_through() const override;  // with one rank
  std::unique_ptr<PendingResult> run(const std::shared_ptr<GradBucket>& bucket) override;
  void use_transport(
      const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
      std::shared_ptr<Transport> transport) override;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  std::shared_ptr<Transport> transport_;  // may be null
  std::optional<c10::ScalarType> wire_dtype_;
  std::string name_;
};

// Sends nothing: every rank keeps its own gradients. Measures the cost of everything but
// communication.
class NoopHook final : public Hook {
 public:
  std::string name() const override {
    return "noop";
  }
  bool passes_through() const override {
    return true;
  }
  std::unique_ptr<PendingResult> run(const std::shared_ptr<GradBucket>& bucket) override;
};

}  // namespace commhooks
