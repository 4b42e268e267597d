// Parameters whose gradients a step may not change.
#pragma once

#include "reducer/bucket.h"
#include "reducer/usage.h"

#include <utility>
#include <vector>

namespace commhooks {

// See Note [Unused parameters]. Averages of parameters that this rank used are written as soon as
// they are available; those of other parameters wait here until it is known whether any rank used
// them.
class UnusedParameters {
 public:
  explicit UnusedParameters(size_t parameters) : usage_(parameters) {}

  // `exchanges_use`: whether ranks exchange which parameters they used at the end of this step.
  void begin_step(bool exchanges_use) {
    exchanges_use_ = exchanges_use;
  }
  bool exchanges_use() const {
    return exchanges_use_;
  }

  // Notes that this rank uses the parameter, in this step or before it in `no_sync`.
  void add_use(size_t index) {
    usage_.add(index);
  }
  // Returns whether the gradient of the parameter may have to stay unchanged.
  bool may_include(size_t index) const {
    return exchanges_use_ ? !usage_.here(index) : !always_unused_.empty() && always_unused_[index];
  }

  // Copies the gradients of such parameters before the hook overwrites them. `parameters`: all
  // parameters of the reducer.
  void keep(
      const Bucket& bucket, const std::vector<at::Tensor>& parameters, const GradientStore& store);
  // Keeps `average`, which contains averages of such parameters.
  void defer(Bucket& bucket, at::Tensor average);

  Usage& usage() {
    return usage_;
  }

  struct Deferred {
    Bucket* bucket;
    at::Tensor average;
    std::vector<size_t> positions;  // of parameters that other ranks used, but this rank did not
  };
  // Returns the deferred averages to write, now that the use on all ranks is known, and drops the
  // copies of the gradients of these parameters.
  std::vector<Deferred> settle(const Usage::Everywhere& everywhere);
  // Keeps the result for later steps, as the graph is static.
  void remember(const Usage::Everywhere& everywhere);
  // Restores the gradients that were copied.
  void restore(const std::vector<at::Tensor>& parameters, const GradientStore& store);

  // Forgets this step.
  void forget();
  // Forgets what `remember` has kept.
  void forget_graph() {
    always_unused_.clear();
  }

 private:
  bool exchanges_use_ = false;
  Usage usage_;
  std::vector<std::pair<size_t, at::Tensor>> kept_;
  std::vector<std::pair<Bucket*, at::Tensor>> deferred_;
  std::vector<char> always_unused_;  // per parameter, with `static_graph`; empty until known
};

}  // namespace commhooks
