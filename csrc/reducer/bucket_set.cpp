#include "reducer/bucket_set.h"

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

// Returns the indices of the parameters in each bucket.
std::vector<std::vector<size_t>> plan_of(
    const std::vector<at::Tensor>& parameters,
    const ReducerOptions& options,
    const std::vector<size_t>& order) {
  const auto& sizes = options.bucket_bytes;
  TORCH_CHECK_VALUE(!sizes.empty(), "Expected at least one bucket size.");
  // A sparse gradient has a bucket of its own.
  auto keys = options.keys;
  int64_t unused_key = *std::max_element(keys.begin(), keys.end());
  for (size_t index = 0; index < keys.size(); ++index) {
    if (options.sparse[index]) {
      keys[index] = ++unused_key;
    }
  }

  using Key = std::tuple<c10::ScalarType, c10::DeviceType, c10::DeviceIndex, int64_t>;
  std::map<Key, OpenBucket> open;
  std::vector<std::pair<size_t, std::vector<size_t>>> closed;  // (last position, members)
  const auto close = [&](OpenBucket& bucket) {
    closed.emplace_back(bucket.last_position, std::move(bucket.members));
    bucket = {.number = bucket.number + 1};
  };
  for (size_t position = 0; position < order.size(); ++position) {
    const size_t index = order[position];
    const auto& parameter = parameters[index];
    const auto device = parameter.device();
    auto& bucket = open[{parameter.scalar_type(), device.type(), device.index(), keys[index]}];
    bucket.members.push_back(index);
    bucket.bytes += static_cast<int64_t>(parameter.nbytes());
    bucket.last_position = position;
    if (bucket.bytes >= sizes[std::min(bucket.number, sizes.size() - 1)]) {
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
  for (auto& [position, members] : closed) {
    plan.push_back(std::move(members));
  }
  std::stable_partition(plan.begin(), plan.end(), [&](const std::vector<size_t>& members) {
    return options.keys[members.front()] != options.late_key;
  });
  return plan;
}

}  // namespace

BucketSet make_buckets(
    const std::vector<at::Tensor>& parameters,
    const ReducerOptions& options,
    const ReductionGroups& groups,
    std::vector<size_t> order) {
  const auto plan = plan_of(parameters, options, order);
  BucketSet set;
  set.locations.resize(parameters.size());
  for (size_t b = 0; b < plan.size(); ++b) {
    std::vector<at::Tensor> members;
    std::vector<std::string> names;
    for (size_t position = 0; position < plan[b].size(); ++position) {
      const size_t index = plan[b][position];
      set.locations[index] = {b, position};
      members.push_back(parameters[index]);
      names.push_back(options.names[index]);
    }
    const size_t first = plan[b].front();
    const bool is_sparse = options.sparse[first];
    const size_t group = groups.index_of(options.keys[first], is_sparse);
    auto bucket = std::make_unique<Bucket>(
        std::move(members), std::move(names), plan[b], options.gradient_as_bucket_view,
        groups[group].memory);
    bucket->index = b;
    bucket->is_sparse = is_sparse;
    bucket->group = group;
    set.all.push_back(std::move(bucket));
  }
  set.order = std::move(order);
  return set;
}

}  // namespace commhooks
