#include "reducer/static_graph.h"

#include <algorithm>

namespace commhooks {

void StaticGraph::begin_step() {
  watched_.clear();
  left_ = expected_;
}

std::vector<size_t> StaticGraph::learn() {
  expected_.assign(parameters_, 0);
  std::vector<size_t> by_last;
  for (auto index = watched_.rbegin(); index != watched_.rend(); ++index) {
    if (expected_[*index]++ == 0) {
      by_last.push_back(*index);
    }
  }
  std::reverse(by_last.begin(), by_last.end());
  watched_.clear();
  return by_last;
}

}  // namespace commhooks
