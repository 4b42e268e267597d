#include "reducer/bucket_plan.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace commhooks {
namespace {

struct OpenBucket {
  std::vector<size_t> members;
  int64_t bytes = 0;
  size_t last_position = 0;  // of its members in `order`
  size_t number = 0;         // among the buckets of its key
};

}  // namespace

std::vector<std::vector<size_t>> plan_buckets(
    const std::vector<at::Tensor>& parameters,
    const std::vector<int64_t>& keys,
    const std::vector<size_t>& order,
    const BucketCaps& caps) {
  TORCH_CHECK_VALUE(!caps.empty(), "Expected at least one bucket size.");
  using Key = std::tuple<c10::ScalarType, c10::DeviceType, c10::DeviceIndex, int64_t>;
  std::map<Key, OpenBucket> open;
  std::vector<std::pair<size_t, std::vector<size_t>>> closed;  // (last position, members)

  const auto close = [&](OpenBucket& bucket) {
    closed.emplace_back(bucket.last_position, std::move(bucket.members));
    const size_t number = bucket.number + 1;
    bucket = OpenBucket();
    bucket.number = number;
  };

  for (size_t position = 0; position < order.size(); ++position) {
    const size_t index = order[position];
    const auto& parameter = parameters[index];
    const auto device = parameter.device();
    auto& bucket = open[{parameter.scalar_type(), device.type(), device.index(), keys[index]}];
    bucket.members.push_back(index);
    bucket.bytes += static_cast<int64_t>(parameter.nbytes());
    bucket.last_position = position;
    if (bucket.bytes >= caps[std::min(bucket.number, caps.size() - 1)]) {
      close(bucket);
    }
  }
  for (auto& [key, bucket] : open) {
    if (!bucket.members.empty()) {
      close(bucket);
    }
  }
  std::sort(closed.begin(), closed.end());

  std::vector<std::vector<size_t>> plan;
  plan.reserve(closed.size());
  for (auto& [position, members] : closed) {
    plan.push_back(std::move(members));
  }
  return plan;
}

}  // namespace commhooks
