#include "reducer/bucket_set.h"

#include "reducer/bucket_plan.h"
#include "reducer/reducer.h"

#include <algorithm>

namespace commhooks {
namespace {

std::vector<std::vector<size_t>> plan_of(
    const std::vector<at::Tensor>& parameters,
    const ReducerOptions& options,
    const std::vector<size_t>& order,
    bool back_to_front) {
  // A sparse gradient has a bucket of its own.
  auto keys = options.keys;
  int64_t unused_key = *std::max_element(keys.begin(), keys.end());
  for (size_t index = 0; index < keys.size(); ++index) {
    if (options.sparse[index]) {
      keys[index] = ++unused_key;
    }
  }
  std::vector<std::vector<size_t>> plan;
  if (back_to_front) {
    plan = plan_buckets(parameters, keys, {order.rbegin(), order.rend()}, options.caps);
    std::reverse(plan.begin(), plan.end());
    for (auto& members : plan) {
      std::reverse(members.begin(), members.end());
    }
  } else {
    plan = plan_buckets(parameters, keys, order, options.caps);
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
    std::vector<size_t> order,
    bool back_to_front) {
  const auto plan = plan_of(parameters, options, order, back_to_front);
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
    auto bucket = std::make_unique<Bucket>(
        std::move(members), std::move(names), plan[b], options.gradient_as_bucket_view);
    bucket->index = b;
    const size_t first = plan[b].front();
    bucket->is_sparse = options.sparse[first];
    bucket->group = groups.index_of(options.keys[first], bucket->is_sparse);
    set.all.push_back(std::move(bucket));
  }
  set.order = std::move(order);
  set.back_to_front = back_to_front;
  return set;
}

}  // namespace commhooks
