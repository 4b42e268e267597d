// Parameters whose gradients a step may have to leave as they are.
#pragma once

#include "reducer/bucket.h"
#include "reducer/usage.h"

#include <utility>
#include <vector>

namespace commhooks {

// See Note [Unused parameters]. A step writes averages of parameters that this rank used as soon as
// they are there; those of the others wait here until it is known whether any rank used them.
class UnusedParameters {
 public:
  explicit UnusedParameters(size_t parameters) : usage_(parameters) {}

  // `ranks_tell`: whether at the end of this step ranks tell each other what they used.
  void begin_step(bool ranks_tell) {
    ranks_tell_ = ranks_tell;
  }
  bool ranks_tell() const {
    return ranks_tell_;
  }

  // This rank uses the parameter, in this step or before it in `no_sync`.
  void add_use(size_t index) {
    usage_.add(index);
  }
  // Whether the parameter's gradient may have to stay as it is.
  bool may_include(size_t index) const {
    return ranks_tell_ ? !usage_.here(index) : !unused_for_good_.empty() && unused_for_good_[index];
  }

  // Copies the gradients of such parameters, as the hook is about to work in place on them.
  // `parameters`: all of the reducer.
  void keep(
      const Bucket& bucket, const std::vector<at::Tensor>& parameters, const GradientStore& store);
  // That `average` holds averages of such parameters.
  void defer(Bucket& bucket, at::Tensor average);

  Usage& usage() {
    return usage_;
  }

  struct Deferred {
    Bucket* bucket;
    at::Tensor average;
    std::vector<size_t> positions;  // of parameters that other ranks used, and this one did not
  };
  // What was deferred and is to be written, now that the use on all ranks is known. The gradients of
  // these parameters need no longer be kept.
  std::vector<Deferred> settle(const Usage::Everywhere& everywhere);
  // From now on ranks need not tell each other: the graph is static.
  void remember(const Usage::Everywhere& everywhere);
  // Puts back the gradients that were kept.
  void restore(const std::vector<at::Tensor>& parameters, const GradientStore& store);

  // Of this step.
  void forget();
  // Also of the graph.
  void forget_all();

 private:
  bool ranks_tell_ = false;
  Usage usage_;
  std::vector<std::pair<size_t, at::Tensor>> kept_;
  std::vector<std::pair<Bucket*, at::Tensor>> deferred_;
  std::vector<char> unused_for_good_;  // per parameter, under `static_graph`; empty until known
};

}  // namespace commhooks
