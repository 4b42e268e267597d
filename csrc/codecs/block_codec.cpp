#include "codecs/block_codec.h"

#include "codecs/blocks.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace commhooks {
namespace {

constexpr int64_t kGrainElements = 1 << 15;

void* data_or_null(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->data_ptr() : nullptr;
}

}  // namespace

CpuBlockCodec::CpuBlockCodec(const Format& format, int64_t block_size) : block_size_(block_size) {
  for (const auto make : {level_loops, float_loops, sign_loops}) {
    loops_ = loops_ ? std::move(loops_) : make(format);
  }
  TORCH_CHECK(loops_.has_value(), "Expected the name of codes, found '", format.codes, "'.");
}

void CpuBlockCodec::encode(
    const at::Tensor& values,
    const at::Tensor& messages,
    int64_t part_length,
    const std::optional<at::Tensor>& error,
    uint64_t seed,
    bool keep_residual) const {
  const Parts parts{values.numel(), part_length, block_size_};
  const EncodeCall call{
      .parts = parts,
      .values = values.data_ptr(),
      .error = data_or_null(error),
      .messages = messages.data_ptr<uint8_t>(),
      .message_bytes = messages.size(1),
      .seed = seed,
      .is_double = values.scalar_type() == c10::kDouble,
      .keep_residual = keep_residual,
  };
  at::parallel_for(
      0, messages.size(0) * parts.blocks_per_part, grain(),
      [&](int64_t begin, int64_t end) { loops_->encode(call, begin, end); });
}

void CpuBlockCodec::average(
    const at::Tensor& messages, const at::Tensor& values, int64_t part_length) const {
  decode(messages, messages.size(0), values, part_length, nullptr);
}

bool CpuBlockCodec::assemble(
    const at::Tensor& messages,
    const at::Tensor& values,
    int64_t part_length,
    const std::optional<at::Tensor>& kept) const {
  const int64_t blocks = Parts{values.numel(), part_length, block_size_}.blocks_per_part;
  const auto* const bytes = messages.data_ptr<uint8_t>();
  bool is_finite = true;
  for (int64_t row = 0; row < messages.size(0); ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      is_finite &= std::isfinite(load<float>(bytes + row * messages.size(1) + 4 * block));
    }
  }
  if (is_finite) {
    decode(messages, 1, values, part_length, data_or_null(kept));
  } else {
    values.fill_(std::numeric_limits<double>::quiet_NaN());
  }
  return is_finite;
}

int64_t CpuBlockCodec::grain() const {
  return std::max<int64_t>(1, kGrainElements / block_size_);
}

void CpuBlockCodec::decode(
    const at::Tensor& messages,
    int64_t count,
    const at::Tensor& values,
    int64_t part_length,
    void* kept) const {
  const DecodeCall call{
      .parts = {values.numel(), part_length, block_size_},
      .messages = messages.data_ptr<uint8_t>(),
      .message_bytes = messages.size(1),
      .message_count = count,
      .values = values.data_ptr(),
      .kept = kept,
      .is_double = values.scalar_type() == c10::kDouble,
  };
  at::parallel_for(
      0, messages.size(0) / count * call.parts.blocks_per_part, grain(),
      [&](int64_t begin, int64_t end) { loops_->decode(call, begin, end); });
}

}  // namespace commhooks
