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
// With this multiple the codes of a block fill whole words at any width.
constexpr int64_t kBlockMultiple = 32;
// With this multiple the scales of groups fill whole words, and kernels find the largest number of
// a group within a warp.
constexpr int64_t kGroupedMultiple = 128;

int64_t divide_up(int64_t numerator, int64_t denominator) {
  return (numerator + denominator - 1) / denominator;
}

void check_values(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.device().is_cpu(), "Expected ", name, " on the CPU, found it on ", tensor.device(),
      ": this codec has no kernels for other devices.");
  TORCH_CHECK(
      tensor.scalar_type() == c10::kFloat || tensor.scalar_type() == c10::kDouble, "Expected ",
      name, " to be float32 or float64, found ", tensor.scalar_type(), ".");
  TORCH_CHECK(
      tensor.dim() == 1 && tensor.is_contiguous(), "Expected ", name,
      " to be flat and contiguous, found shape ", tensor.sizes(), " with strides ",
      tensor.strides(), ".");
}

// Checks a tensor that has one number per value.
void check_companion(const char* name, const at::Tensor& tensor, const at::Tensor& values) {
  check_values(name, tensor);
  TORCH_CHECK(
      tensor.scalar_type() == values.scalar_type() && tensor.numel() == values.numel(), "Expected ",
      name, " to have the ", values.numel(), " elements and the dtype ", values.scalar_type(),
      " of the values, found ", tensor.numel(), " of ", tensor.scalar_type(), ".");
}

}  // namespace

CpuBlockCodec::CpuBlockCodec(const Format& format, int64_t block_size) : block_size_(block_size) {
  for (const auto make : {level_loops, float_loops, sign_loops}) {
    loops_ = loops_ == nullptr ? make(format) : std::move(loops_);
  }
  TORCH_CHECK(loops_ != nullptr, "Expected the name of codes, found '", format.codes, "'.");
  const int64_t multiple = loops_->group() == 0 ? kBlockMultiple : kGroupedMultiple;
  TORCH_CHECK(
      block_size > 0 && block_size <= kMaxBlockSize && block_size % multiple == 0,
      "Expected block_size to be a multiple of ", multiple, " up to ", kMaxBlockSize, ", found ",
      block_size, ".");
}

int64_t CpuBlockCodec::encoded_bytes(int64_t part_length) const {
  TORCH_CHECK(part_length >= 0, "Expected part_length to be at least 0, found ", part_length, ".");
  return 4 * (divide_up(part_length, block_size_) + divide_up(part_length * loops_->bits(), 32)) +
      group_bytes(part_length);
}

int64_t CpuBlockCodec::group_bytes(int64_t part_length) const {
  return loops_->group() == 0 ? 0 : 4 * divide_up(part_length, 4 * loops_->group());
}

void CpuBlockCodec::encode(
    at::Tensor values,
    at::Tensor messages,
    int64_t part_length,
    const std::optional<at::Tensor>& error,
    uint64_t seed,
    bool keep_residual) const {
  check_values("values", values);
  if (error) {
    check_companion("error", *error, values);
  }
  const Parts parts = parts_of(values, part_length, messages);
  const EncodeCall call{
      .parts = parts,
      .values = values.data_ptr(),
      .error = error ? error->data_ptr() : nullptr,
      .messages = messages.data_ptr<uint8_t>(),
      .message_bytes = messages.size(1),
      .groups_offset = 4 * parts.blocks_per_part(),
      .codes_offset = 4 * parts.blocks_per_part() + group_bytes(part_length),
      .seed = seed,
      .is_double = values.scalar_type() == c10::kDouble,
      .keep_residual = keep_residual,
  };
  at::parallel_for(
      0, messages.size(0) * parts.blocks_per_part(), grain(),
      [&](int64_t begin, int64_t end) { loops_->encode(call, begin, end); });
}

void CpuBlockCodec::average(
    const at::Tensor& messages, at::Tensor values, int64_t part_length) const {
  check_values("values", values);
  const Parts parts = parts_of(values, part_length, messages);
  TORCH_CHECK(
      messages.size(0) > 0 && values.numel() <= part_length,
      "Expected messages for one part of at most ", part_length, " elements, found ",
      messages.size(0), " messages and ", values.numel(), " elements.");
  decode(
      {
          .parts = parts,
          .messages = messages.data_ptr<uint8_t>(),
          .message_bytes = messages.size(1),
          .groups_offset = 4 * parts.blocks_per_part(),
          .codes_offset = 4 * parts.blocks_per_part() + group_bytes(part_length),
          .message_count = messages.size(0),
          .values = values.data_ptr(),
          .kept = nullptr,
          .is_double = values.scalar_type() == c10::kDouble,
      },
      parts.blocks_per_part());
}

bool CpuBlockCodec::assemble(
    const at::Tensor& messages,
    at::Tensor values,
    int64_t part_length,
    std::optional<at::Tensor> kept) const {
  check_values("values", values);
  if (kept) {
    check_companion("kept", *kept, values);
  }
  const Parts parts = parts_of(values, part_length, messages);
  const int64_t blocks = parts.blocks_per_part();
  const auto* const bytes = messages.data_ptr<uint8_t>();
  bool is_finite = true;
  for (int64_t row = 0; row < messages.size(0); ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      is_finite &= std::isfinite(load<float>(bytes + row * messages.size(1) + 4 * block));
    }
  }
  if (!is_finite) {
    values.fill_(std::numeric_limits<double>::quiet_NaN());
    return false;
  }
  decode(
      {
          .parts = parts,
          .messages = bytes,
          .message_bytes = messages.size(1),
          .groups_offset = 4 * blocks,
          .codes_offset = 4 * blocks + group_bytes(part_length),
          .message_count = 1,
          .values = values.data_ptr(),
          .kept = kept ? kept->data_ptr() : nullptr,
          .is_double = values.scalar_type() == c10::kDouble,
      },
      messages.size(0) * blocks);
  return true;
}

int64_t CpuBlockCodec::grain() const {
  return std::max<int64_t>(1, kGrainElements / block_size_);
}

void CpuBlockCodec::decode(const DecodeCall& call, int64_t blocks) const {
  at::parallel_for(
      0, blocks, grain(), [&](int64_t begin, int64_t end) { loops_->decode(call, begin, end); });
}

Parts CpuBlockCodec::parts_of(
    const at::Tensor& values, int64_t part_length, const at::Tensor& messages) const {
  TORCH_CHECK(
      messages.device().is_cpu() && messages.scalar_type() == c10::kByte, "Expected ",
      "messages to be uint8 on the CPU, found ", messages.scalar_type(), " on ", messages.device(),
      ".");
  const int64_t bytes = encoded_bytes(part_length);
  TORCH_CHECK(
      messages.dim() == 2 && messages.is_contiguous() && messages.size(1) == bytes,
      "Expected messages as contiguous rows of ", bytes, " bytes, for ", part_length,
      " elements each, found shape ", messages.sizes(), ".");
  TORCH_CHECK(
      values.numel() <= messages.size(0) * part_length, "Expected at most ", messages.size(0),
      " parts of ", part_length, " elements, found ", values.numel(), " elements.");
  return {values.numel(), part_length, block_size_};
}

}  // namespace commhooks
