#include "reducer/gradient.h"

#if __has_include(<torch/csrc/distributed/autograd/context/context.h>) && !defined(_WIN32)
#include <torch/csrc/distributed/autograd/context/context.h>
#define COMMHOOKS_HAS_RPC
#endif

#include <utility>

namespace commhooks {
namespace {

class LocalGradients final : public GradientStore {
 public:
  at::Tensor get(const at::Tensor& parameter) const override {
    return parameter.grad();
  }
  bool has(const at::Tensor& parameter) const override {
    return parameter.grad().defined();
  }
  void set(const at::Tensor& parameter, at::Tensor gradient) const override {
    parameter.mutable_grad() = std::move(gradient);
  }
};

class NoGradients final : public GradientStore {
 public:
  at::Tensor get(const at::Tensor& /*parameter*/) const override {
    return {};
  }
  bool has(const at::Tensor& /*parameter*/) const override {
    return false;
  }
  void set(const at::Tensor& /*parameter*/, at::Tensor /*gradient*/) const override {}
  bool is_nowhere() const override {
    return true;
  }
};

#ifdef COMMHOOKS_HAS_RPC
namespace dist_autograd = torch::distributed::autograd;

class ContextGradients final : public GradientStore {
 public:
  explicit ContextGradients(dist_autograd::ContextPtr context) : context_(std::move(context)) {}

  at::Tensor get(const at::Tensor& parameter) const override {
    at::Tensor found;
    if (has(parameter)) {
      context_->runGradCallbackForVariable(parameter, [&](at::Tensor& gradient) {
        found = gradient;
        return false;
      });
    }
    return found;
  }

  bool has(const at::Tensor& parameter) const override {
    return context_->getGradients().contains(parameter);
  }

  void set(const at::Tensor& parameter, at::Tensor gradient) const override {
    TORCH_CHECK(
        has(parameter),
        "A parameter that this rank did not use in a distributed autograd context cannot get a "
        "gradient in it: all ranks have to use the same parameters.");
    context_->runGradCallbackForVariable(parameter, [&](at::Tensor& place) {
      place = std::move(gradient);
      return true;
    });
  }

 private:
  dist_autograd::ContextPtr context_;
};
#endif

}  // namespace

std::shared_ptr<const GradientStore> current_gradients() {
#ifdef COMMHOOKS_HAS_RPC
  if (auto context = dist_autograd::ThreadLocalDistAutogradContext::getContextPtr()) {
    return std::make_shared<ContextGradients>(std::move(context));
  }
#endif
  return local_gradients();
}

const std::shared_ptr<const GradientStore>& local_gradients() {
  static const std::shared_ptr<const GradientStore> store = std::make_shared<LocalGradients>();
  return store;
}

const std::shared_ptr<const GradientStore>& no_gradients() {
  static const std::shared_ptr<const GradientStore> store = std::make_shared<NoGradients>();
  return store;
}

}  // namespace commhooks
