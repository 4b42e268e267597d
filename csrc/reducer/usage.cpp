#include "reducer/usage.h"

#include <ATen/ops/tensor.h>

#include <algorithm>

namespace commhooks {

void Usage::start_exchange(
    const std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>& groups,
    const std::vector<int>& hits,
    c10::Device device) {
  std::vector<int> numbers(used_.begin(), used_.end());
  for (size_t index = 0; index < hits.size(); ++index) {
    numbers[index] += 2 * hits[index];
  }
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  for (const auto& group : groups) {
    maps_.push_back(at::tensor(numbers, at::TensorOptions().dtype(at::kInt)).to(device));
    if (group->getSize() > 1) {
      std::vector<at::Tensor> tensors = {maps_.back()};
      works_.push_back(group->allreduce(tensors, options));
    }
  }
}

std::vector<Usage::Everywhere> Usage::finish_exchange() {
  for (const auto& work : works_) {
    work->wait();
  }
  std::vector<Everywhere> everywhere;
  for (const auto& map : maps_) {
    const at::Tensor numbers = map.cpu();
    const int* begin = numbers.const_data_ptr<int>();
    everywhere.push_back({std::vector<int>(begin, begin + numbers.numel())});
  }
  works_.clear();
  maps_.clear();
  return everywhere;
}

void Usage::clear() {
  for (const auto& work : works_) {
    try {
      work->wait();
    } catch (const std::exception&) {
      // Whoever clears after a failure has that to report.
    }
  }
  works_.clear();
  maps_.clear();
  std::fill(used_.begin(), used_.end(), 0);
}

}  // namespace commhooks
