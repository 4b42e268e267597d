#include "reducer/bucket.h"

#include "reducer/layout.h"

#include <ATen/ops/_sparse_coo_tensor_with_dims.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace commhooks {
namespace {

// Strides of dimensions of size one, and of empty tensors, do not affect the order in memory.
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

// Gradients are copied once this many bytes have been gathered: few enough to still be in the cache
// of a core, and enough for one pass over many small gradients.
constexpr int64_t kFlushBytes = 1 << 20;

// Buckets of this size or more do not stay in the caches until they are read again.
constexpr int64_t kCachedBytes = 4 << 20;

// See Note [Complex gradients].
at::Tensor packed_view(const at::Tensor& gradient) {
  return gradient.is_complex() ? at::view_as_real(gradient.resolve_conj()) : gradient;
}

std::vector<at::Tensor> packed_views(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> views;
  views.reserve(parameters.size());
  for (const auto& parameter : parameters) {
    views.push_back(parameter.is_complex() ? at::view_as_real(parameter.detach()) : parameter);
  }
  return views;
}

}  // namespace

Bucket::Bucket(
    std::vector<at::Tensor> parameters,
    std::vector<std::string> names,
    std::vector<size_t> indices,
    bool grads_are_views,
    TransportPtr transport)
    : parameters_(std::move(parameters)),
      layout_(make_bucket_layout(packed_views(parameters_), std::move(names))),
      indices_(std::move(indices)),
      grads_are_views_(grads_are_views),
      transport_(std::move(transport)),
      numel_(static_cast<int64_t>(layout_->offsets.back() + layout_->lengths.back())),
      copier_(device()),
      views_(indices_.size()) {}

at::Tensor Bucket::view(const at::Tensor& flat, size_t position) const {
  return gradient_view(
      flat, layout_->parameters[position], static_cast<int64_t>(layout_->offsets[position]));
}

at::Tensor Bucket::memory(c10::ScalarType dtype) const {
  return transport_ ? transport_->allocate(numel_, dtype)
                    : at::empty({numel_}, at::TensorOptions().dtype(dtype).device(device()));
}

const at::Tensor& Bucket::flat() {
  if (!flat_.defined()) {
    flat_ = memory(dtype());
    flat_data_ = flat_.const_data_ptr();
  }
  return flat_;
}

const at::Tensor& Bucket::own_view(size_t position) {
  flat();
  at::Tensor& own = views_[position];
  if (!own.defined() || !is_own_view(packed_view(own), position)) {
    // Module.to() and its like replace the data of gradients, which are the tensors in `views_`.
    const at::Tensor packed = view(flat_, position);
    own = parameters_[position].is_complex() ? at::view_as_complex(packed) : packed;
  }
  return own;
}

c10::ScalarType Bucket::packed_dtype(const PackFormat& format) const {
  return format.keeps_views && grads_are_views_ ? dtype() : format.dtype.value_or(dtype());
}

const at::Tensor& Bucket::packed(const PackFormat& format) {
  const auto packed_as = packed_dtype(format);
  if (packed_as == dtype()) {
    return flat();
  }
  if (!wire_.defined() || wire_.scalar_type() != packed_as) {
    wire_ = memory(packed_as);
  }
  return wire_;
}

void Bucket::release() {
  wire_.reset();
  if (!grads_are_views_) {
    flat_.reset();
  }
}

bool Bucket::leaves_cache() const {
  return bytes() >= kCachedBytes;
}

bool Bucket::is_own_view(const at::Tensor& grad, size_t position) const {
  return grad.is_alias_of(flat_) &&
      grad.data_ptr() == at_offset(flat_, layout_->offsets[position]) &&
      same_memory_order(grad, layout_->strides[position]);
}

bool Bucket::is_plain(const at::Tensor& grad, size_t position) const {
  return copier_.copies_pieces() && !grad.is_neg() &&
      same_memory_order(grad, layout_->strides[position]);
}

void Bucket::begin_step() {
  progress = {.missing = indices_.size()};
  gathered_.assign(indices_.size(), 0);
  packs_all_ = true;
  streams_.clear();
  if (transport_ && flat_.defined() && flat_.const_data_ptr() != flat_data_) {
    // A user has moved gradients, which are views, with share_memory() for example.
    moved_ = std::exchange(flat_, {});
  }
}

void Bucket::end_step() {
  reduction = {};
  store_ = {};
  clear_gathered();
  moved_.reset();
  finite_.reset();
}

void Bucket::enter_stream() {
  if (!streams_.join(device())) {
    return;
  }
  for (const at::Tensor& parameter : parameters_) {
    if (const at::Tensor grad = store_.get(parameter); grad.defined()) {
      record_on_current_stream(grad);
    }
  }
  for (const at::Tensor& memory : {flat_, wire_}) {
    if (memory.defined()) {
      record_on_current_stream(memory);
    }
  }
}

void Bucket::gather(const PackFormat& format, size_t i) {
  gathered_[i] = 1;
  const at::Tensor target = packed(format);
  const at::Tensor original = store_.get(parameters_[i]);
  if (!original.defined()) {
    if (copier_.copies_pieces()) {
      const auto length = static_cast<int64_t>(layout_->lengths[i]);
      pieces_.push_back({nullptr, at_offset(target, layout_->offsets[i]), length});
    } else {
      view(target, i).zero_();
    }
    return;
  }
  check_gradient(original, i);
  if (grads_are_views_) {
    flat();
  }
  const at::Tensor grad = packed_view(original);
  const bool is_view = grads_are_views_ && is_own_view(grad, i);
  if (is_view && target.is_same(flat_) && format.scale == 1.0) {
    packs_all_ = false;
    return;
  }
  if (is_plain(grad, i)) {
    pieces_.push_back({grad.data_ptr(), at_offset(target, layout_->offsets[i]), grad.numel()});
    pieces_numel_ += grad.numel();
    kept_.push_back(grad.storage());
  } else {
    sources_.push_back(grad.detach());
    destinations_.push_back(view(target, i));
  }
  if (grads_are_views_ && !is_view) {
    replaced_.emplace_back(i, original);
  }
}

void Bucket::flush(const PackFormat& format) {
  if (format.checks_finite && !finite_.defined()) {
    finite_ = at::ones({}, at::TensorOptions().dtype(c10::kBool).device(device()));
  }
  copier_.copy_pieces(
      pieces_, dtype(), packed_dtype(format), format.scale, leaves_cache(), finite_);
  copy_tensors(sources_, destinations_, format.scale, finite_);
  for (const auto& [i, original] : replaced_) {
    if (store_.get(parameters_[i]).is_same(original)) {  // otherwise a hook has replaced it
      store_.set(parameters_[i], own_view(i));
    }
  }
  clear_gathered();
}

void Bucket::clear_gathered() {
  pieces_.clear();
  pieces_numel_ = 0;
  sources_.clear();
  destinations_.clear();
  replaced_.clear();
  kept_.clear();
}

void Bucket::pack_early(const PackFormat& format, size_t position) {
  gather(format, position);
  if (pieces_numel_ * static_cast<int64_t>(c10::elementSize(dtype())) >= kFlushBytes) {
    flush(format);
  }
}

at::Tensor Bucket::pack(const PackFormat& format) {
  if (is_sparse) {
    return pack_sparse(format);
  }
  if (store_.is_nowhere()) {
    // Gradients may be views of the bucket's own memory.
    return memory(packed_dtype(format)).zero_();
  }
  for (size_t i = 0; i < indices_.size(); ++i) {
    if (!gathered_[i]) {
      gather(format, i);
    }
  }
  flush(format);
  return packed(format);
}

at::Tensor Bucket::pack_sparse(const PackFormat& format) const {
  const at::Tensor& parameter = parameters_.front();
  const at::Tensor grad = store_.get(parameter);
  if (!grad.defined()) {
    const auto options = parameter.options().layout(c10::kSparse);
    return at::_sparse_coo_tensor_with_dims(1, parameter.dim() - 1, parameter.sizes(), options)
        ._coalesced_(true);
  }
  // The gradient is dense if the parameter also has other uses.
  const at::Tensor rows = grad.is_sparse() ? grad.coalesce() : grad.detach().to_sparse(1);
  return rows.mul(format.scale).coalesce();
}

void Bucket::check_result(const at::Tensor& result) const {
  const bool fits = is_sparse ? result.is_sparse() && result.sizes() == parameters_.front().sizes()
                              : result.layout() == c10::kStrided && result.numel() == numel_;
  const bool is_copied = result.is_floating_point() && result.element_size() > 1;  // not float8
  TORCH_CHECK(
      fits && is_copied && result.device() == device(),
      "The communication hook returned a tensor that does not fit its bucket (",
      layout_->describe(), "): expected ", numel_, " elements of ", dtype(), " on ", device(),
      ", found ", result.numel(), " elements of ", result.scalar_type(), " on ", result.device(),
      ". A hook returns the average in the shape of `bucket.buffer()`, in any of fp64, fp32, fp16 and bf16.");
}

void Bucket::unpack(const at::Tensor& result, const std::vector<size_t>& positions) {
  if (is_sparse) {
    if (!positions.empty()) {
      store_.set(parameters_.front(), result.to(dtype()));
    }
    return;
  }
  const at::Tensor source = result.resolve_neg().reshape({-1});
  // Hooks may also return another tensor over the memory of the bucket.
  const bool is_in_place = grads_are_views_ && flat_.defined() && source.scalar_type() == dtype() &&
      source.const_data_ptr() == flat_.const_data_ptr();
  std::vector<Piece> pieces;
  pieces.reserve(positions.size());
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> destinations;
  for (const size_t i : positions) {
    const at::Tensor& parameter = parameters_[i];
    at::Tensor original = store_.get(parameter);
    if (!original.defined() || original.is_conj()) {
      original = grads_are_views_
          ? own_view(i)
          : at::empty_strided(parameter.sizes(), gradient_strides(parameter), parameter.options());
      store_.set(parameter, original);
    }
    const at::Tensor grad = original.is_complex() ? at::view_as_real(original) : original;
    if (is_in_place && is_own_view(grad, i)) {  // unless replaced after it was packed
      continue;
    }
    if (is_plain(grad, i)) {
      pieces.push_back({at_offset(source, layout_->offsets[i]), grad.data_ptr(), grad.numel()});
    } else {
      sources.push_back(view(source, i));
      destinations.push_back(grad.detach());
    }
    torch::autograd::impl::bump_version(original);
  }
  copier_.copy_pieces(pieces, source.scalar_type(), dtype(), 1.0, leaves_cache(), {});
  copy_tensors(sources, destinations, 1.0, {});
}

void Bucket::check_gradient(const at::Tensor& grad, size_t position) const {
  const at::Tensor& parameter = parameters_[position];
  TORCH_CHECK(
      grad.layout() == c10::kStrided && grad.scalar_type() == parameter.scalar_type() &&
          grad.device() == parameter.device() && grad.sizes() == parameter.sizes(),
      "Parameter ", layout_->names[position],
      " has a gradient that does not fit its bucket: expected a dense ", parameter.scalar_type(),
      " tensor of shape ", parameter.sizes(), " on ", parameter.device(), ", found layout ",
      grad.layout(), ", ", grad.scalar_type(), ", shape ", grad.sizes(), " on ", grad.device(),
      ". Sparse gradients are only supported for nn.Embedding and nn.EmbeddingBag with "
      "sparse=True.");
}

}  // namespace commhooks
