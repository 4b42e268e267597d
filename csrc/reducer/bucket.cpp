#include "reducer/bucket.h"

#include "reducer/layout.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace commhooks {
namespace {

// Strides of dimensions of size one (or of empty tensors) say nothing about the order in memory.
bool same_memory_order(const at::Tensor& tensor, const std::vector<int64_t>& strides) {
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) != strides[dim] && tensor.size(dim) != 1) {
      return tensor.numel() == 0;
    }
  }
  return true;
}

char* at_offset(const at::Tensor& flat, size_t elements) {
  return static_cast<char*>(flat.data_ptr()) + elements * flat.itemsize();
}

// Gradients are copied once this much has gathered: few enough to be in a core's cache still, enough
// for one pass over many small ones.
constexpr int64_t kFlushBytes = 1 << 20;

// Buckets above this size have left the caches before they are read again.
constexpr int64_t kStreamBytes = 4 << 20;

// What `convert` cannot do (other devices, other layouts, complex numbers), ATen does.
void copy_tensors(
    const std::vector<at::Tensor>& sources,
    const std::vector<at::Tensor>& destinations,
    double scale) {
  if (destinations.empty()) {
    return;
  }
  at::_foreach_copy_(destinations, sources);
  if (scale != 1.0) {
    at::_foreach_mul_(destinations, scale);
  }
}

}  // namespace

Bucket::Bucket(
    std::shared_ptr<const BucketLayout> layout, std::vector<size_t> indices, bool grads_are_views)
    : layout_(std::move(layout)),
      indices_(std::move(indices)),
      grads_are_views_(grads_are_views),
      numel_(static_cast<int64_t>(layout_->offsets.back() + layout_->lengths.back())) {}

at::Tensor Bucket::view(const at::Tensor& flat, size_t position) const {
  return gradient_view(
      flat, layout_->parameters[position], static_cast<int64_t>(layout_->offsets[position]));
}

const at::Tensor& Bucket::flat() {
  if (!flat_.defined()) {
    flat_ = at::empty({numel_}, at::TensorOptions().dtype(dtype()).device(device()));
    if (grads_are_views_) {
      for (size_t i = 0; i < indices_.size(); ++i) {
        views_.push_back(view(flat_, i));
      }
    }
  }
  return flat_;
}

const at::Tensor& Bucket::packed(const PackFormat& format) {
  const auto wire_dtype = format.dtype.value_or(dtype());
  if (wire_dtype == dtype()) {
    return flat();
  }
  if (!wire_.defined() || wire_.scalar_type() != wire_dtype) {
    wire_ = at::empty({numel_}, at::TensorOptions().dtype(wire_dtype).device(device()));
  }
  return wire_;
}

bool Bucket::streams() const {
  return numel_ * static_cast<int64_t>(c10::elementSize(dtype())) >= kStreamBytes;
}

bool Bucket::is_own_view(const at::Tensor& grad, size_t position) const {
  return grad.is_alias_of(flat_) &&
      grad.data_ptr() == at_offset(flat_, layout_->offsets[position]) &&
      same_memory_order(grad, layout_->strides[position]);
}

bool Bucket::is_plain(const at::Tensor& grad, size_t position) const {
  return grad.is_cpu() && !grad.is_complex() && !grad.is_neg() &&
      same_memory_order(grad, layout_->strides[position]);
}

void Bucket::begin_step() {
  gathered_.assign(indices_.size(), 0);
  pieces_.clear();
  pieces_numel_ = 0;
  sources_.clear();
  destinations_.clear();
  replaced_.clear();
}

void Bucket::gather(const PackFormat& format, size_t i) {
  gathered_[i] = 1;
  const at::Tensor target = packed(format);
  const auto length = static_cast<int64_t>(layout_->lengths[i]);
  at::Tensor& grad = layout_->parameters[i].mutable_grad();
  if (!grad.defined()) {
    if (target.is_cpu() && target.is_floating_point()) {
      pieces_.push_back({nullptr, at_offset(target, layout_->offsets[i]), length});
    } else {
      view(target, i).zero_();
    }
    return;
  }
  check_gradient(grad, i);
  if (grads_are_views_) {
    flat();
  }
  const bool is_view = grads_are_views_ && is_own_view(grad, i);
  if (is_view && target.is_same(flat_) && format.scale == 1.0) {
    return;
  }
  if (is_plain(grad, i)) {
    pieces_.push_back({grad.data_ptr(), at_offset(target, layout_->offsets[i]), length});
    pieces_numel_ += length;
  } else {
    sources_.push_back(grad.detach());
    destinations_.push_back(view(target, i));
  }
  if (grads_are_views_ && !is_view) {
    replaced_.push_back(std::exchange(grad, views_[i]));
  }
}

void Bucket::flush(const PackFormat& format) {
  convert(pieces_, dtype(), format.dtype.value_or(dtype()), format.scale, streams());
  copy_tensors(sources_, destinations_, format.scale);
  pieces_.clear();
  pieces_numel_ = 0;
  sources_.clear();
  destinations_.clear();
  replaced_.clear();
}

void Bucket::pack_early(const PackFormat& format, size_t position) {
  if (!device().is_cpu()) {
    return;
  }
  gather(format, position);
  if (pieces_numel_ * static_cast<int64_t>(c10::elementSize(dtype())) >= kFlushBytes) {
    flush(format);
  }
}

at::Tensor Bucket::pack(const PackFormat& format) {
  for (size_t i = 0; i < indices_.size(); ++i) {
    if (!gathered_[i]) {
      gather(format, i);
    }
  }
  flush(format);
  return packed(format);
}

void Bucket::unpack(const at::Tensor& result, const std::vector<size_t>& positions) {
  const bool already_there = grads_are_views_ && result.is_same(flat_);
  const at::Tensor source = result.reshape({-1});
  std::vector<Piece> pieces;
  pieces.reserve(positions.size());
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> destinations;
  for (const size_t i : positions) {
    at::Tensor& grad = layout_->parameters[i].mutable_grad();
    if (!grad.defined()) {
      const at::Tensor& parameter = layout_->parameters[i];
      grad = grads_are_views_
          ? views_[i]
          : at::empty_strided(parameter.sizes(), layout_->strides[i], parameter.options());
    }
    if (already_there) {
      continue;
    }
    if (is_plain(grad, i)) {
      pieces.push_back({at_offset(source, layout_->offsets[i]), grad.data_ptr(), grad.numel()});
      torch::autograd::impl::bump_version(grad);
    } else {
      sources.push_back(view(source, i));
      destinations.push_back(grad.detach());
    }
  }
  convert(pieces, source.scalar_type(), dtype(), 1.0, streams());
  copy_tensors(sources, destinations, 1.0);
}

void Bucket::check_gradient(const at::Tensor& grad, size_t position) const {
  const at::Tensor& parameter = layout_->parameters[position];
  TORCH_CHECK(
      grad.layout() == c10::kStrided && grad.scalar_type() == parameter.scalar_type() &&
          grad.device() == parameter.device() && grad.sizes() == parameter.sizes(),
      "Parameter ", layout_->names[position],
      " has a gradient that cannot travel in its bucket: expected a dense ",
      parameter.scalar_type(), " tensor of shape ", parameter.sizes(), " on ", parameter.device(),
      ", found layout ", grad.layout(), ", ", grad.scalar_type(), ", shape ", grad.sizes(), " on ",
      grad.device(), ".");
}

}  // namespace commhooks
