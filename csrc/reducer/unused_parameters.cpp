#include "reducer/unused_parameters.h"

#include "reducer/thread_state.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

namespace commhooks {
namespace {

// Does not wait for the device: the memory that is read is pinned, and nothing else writes to it.
at::Tensor to_device(const at::Tensor& numbers, c10::Device device) {
  if (!device.is_cuda()) {
    return numbers.to(device);
  }
  const auto pinned = at::empty(numbers.sizes(), numbers.options().pinned_memory(true));
  return pinned.copy_(numbers).to(device, /*non_blocking=*/true);
}

}  // namespace

bool UnusedParameters::uses_all() const {
  return std::all_of(used_.begin(), used_.end(), [](char used) { return used != 0; });
}

void UnusedParameters::keep(
    const Bucket& bucket, const std::vector<at::Tensor>& parameters, const GradientStore& store) {
  for (const size_t index : bucket.indices()) {
    if (!may_include(index)) {
      continue;
    }
    if (const at::Tensor grad = store.get(parameters[index]); grad.defined()) {
      kept_.emplace_back(index, grad.detach().clone());
    }
  }
}

void UnusedParameters::start_sharing(
    const std::vector<GroupPtr>& groups, const std::vector<int>& gradients, c10::Device device) {
  std::vector<int> numbers(used_.begin(), used_.end());
  for (size_t index = 0; index < gradients.size(); ++index) {
    numbers[index] += 2 * gradients[index];
  }
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  const WithoutPythonObjects hidden;
  for (const auto& group : groups) {
    maps_.push_back(to_device(at::tensor(numbers, at::TensorOptions().dtype(at::kInt)), device));
    if (group->getSize() > 1) {
      std::vector<at::Tensor> tensors = {maps_.back()};
      works_.push_back(group->allreduce(tensors, options));
    }
  }
}

void UnusedParameters::wait() {
  for (const auto& work : works_) {
    work->wait();
  }
  works_.clear();
}

UnusedParameters::Everywhere UnusedParameters::finish_sharing(const std::vector<size_t>& group_of) {
  wait();
  std::vector<at::Tensor> maps;
  for (const at::Tensor& map : maps_) {
    maps.push_back(map.cpu());
  }
  Everywhere everywhere;
  for (size_t index = 0; index < group_of.size(); ++index) {
    const int number = maps[group_of[index]].const_data_ptr<int>()[index];
    everywhere.used.push_back(number > 0);
    everywhere.gradients.push_back(number / 2);
  }
  maps_.clear();
  return everywhere;
}

void UnusedParameters::write_deferred(
    const Everywhere& everywhere,
    const std::function<void(Bucket&, const at::Tensor&, const std::vector<size_t>&)>& write) {
  std::erase_if(kept_, [&](const auto& kept) { return everywhere.used[kept.first]; });
  for (const auto& [bucket, average] : std::exchange(deferred_, {})) {
    std::vector<size_t> positions;
    for (size_t position = 0; position < bucket->indices().size(); ++position) {
      const size_t index = bucket->indices()[position];
      if (!used_[index] && everywhere.used[index]) {
        positions.push_back(position);
      }
    }
    write(*bucket, average, positions);
  }
}

void UnusedParameters::restore(
    const std::vector<at::Tensor>& parameters, const GradientStore& store) {
  for (const auto& [index, kept] : kept_) {
    record_on_current_stream(kept);
    store.get(parameters[index]).detach().copy_(kept);
  }
}

void UnusedParameters::end_step() {
  kept_.clear();
  deferred_.clear();
}

void UnusedParameters::forget_use() {
  for (const auto& work : works_) {
    try {
      work->wait();
    } catch (const std::exception&) {
      // The step has failed for another reason, which the caller reports.
    }
  }
  works_.clear();
  maps_.clear();
  std::fill(used_.begin(), used_.end(), 0);
}

}  // namespace commhooks
