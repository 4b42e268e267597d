#include "reducer/gradient.h"

#if __has_include(<torch/csrc/distributed/autograd/context/context.h>) && !defined(_WIN32)
#include <torch/csrc/distributed/autograd/context/context.h>
#define COMMHOOKS_HAS_RPC
#endif

#include <utility>

namespace commhooks {

GradientStore GradientStore::current() {
  GradientStore store;
#ifdef COMMHOOKS_HAS_RPC
  store.context_ = torch::distributed::autograd::ThreadLocalDistAutogradContext::getContextPtr();
#endif
  return store;
}

GradientStore GradientStore::nowhere() {
  GradientStore store;
  store.is_nowhere_ = true;
  return store;
}

bool GradientStore::has(const at::Tensor& parameter) const {
#ifdef COMMHOOKS_HAS_RPC
  if (context_) {
    return context_->getGradients().contains(parameter);
  }
#endif
  return !is_nowhere_ && parameter.grad().defined();
}

at::Tensor GradientStore::get(const at::Tensor& parameter) const {
#ifdef COMMHOOKS_HAS_RPC
  if (context_) {
    at::Tensor found;
    if (has(parameter)) {
      context_->runGradCallbackForVariable(parameter, [&](at::Tensor& gradient) {
        found = gradient;
        return false;
      });
    }
    return found;
  }
#endif
  return is_nowhere_ ? at::Tensor() : parameter.grad();
}

void GradientStore::set(const at::Tensor& parameter, at::Tensor gradient) const {
#ifdef COMMHOOKS_HAS_RPC
  if (context_) {
    TORCH_CHECK(
        has(parameter),
        "A parameter that this rank did not use in a distributed autograd context cannot get a "
        "gradient in it: all ranks have to use the same parameters.");
    context_->runGradCallbackForVariable(parameter, [&](at::Tensor& place) {
      place = std::move(gradient);
      return true;
    });
    return;
  }
#endif
  if (!is_nowhere_) {
    parameter.mutable_grad() = std::move(gradient);
  }
}

}  // namespace commhooks
