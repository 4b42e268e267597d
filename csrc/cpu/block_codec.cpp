#include "cpu/block_codec.h"

#include "cpu/block_loops.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace commhooks {
namespace {

constexpr int64_t kGrainElements = 1 << 15;
// So that the codes of a block fill whole words whatever their width.
constexpr int64_t kBlockMultiple = 32;

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

// A second tensor of one number per value.
void check_companion(const char* name, const at::Tensor& tensor, const at::Tensor& values) {
  check_values(name, tensor);
  TORCH_CHECK(
      tensor.scalar_type() == values.scalar_type() && tensor.numel() == values.numel(), "Expected ",
      name, " to have the ", values.numel(), " elements and the dtype ", values.scalar_type(),
      " of the values, found ", tensor.numel(), " of ", tensor.scalar_type(), ".");
}

}  // namespace

BlockCodec::BlockCodec(std::unique_ptr<BlockLoops> loops, int64_t block_size)
    : loops_(std::move(loops)), block_size_(block_size) {
  TORCH_CHECK(
      block_size > 0 && block_size <= kMaxBlockSize && block_size % kBlockMultiple == 0,
      "Expected block_size to be a multiple of ", kBlockMultiple, " up to ", kMaxBlockSize,
      ", found ", block_size, ".");
}

int64_t BlockCodec::blocks(int64_t numel) const {
  return divide_up(numel, block_size_);
}

int64_t BlockCodec::encoded_bytes(int64_t numel) const {
  TORCH_CHECK(numel >= 0, "Expected a number of elements, found ", numel, ".");
  return 4 * (blocks(numel) + divide_up(numel * loops_->bits(), 32));
}

void BlockCodec::encode(
    at::Tensor values,
    at::Tensor message,
    const std::optional<at::Tensor>& error,
    uint64_t seed,
    bool keep_residual) const {
  check_values("values", values);
  if (error) {
    check_companion("error", *error, values);
  }
  const int64_t numel = values.numel();
  TORCH_CHECK(message.dim() == 1, "Expected one message, found shape ", message.sizes(), ".");
  check_messages(message, numel);
  auto* const bytes = message.data_ptr<uint8_t>();
  const int64_t codes_end = 4 * blocks(numel) + divide_up(numel * loops_->bits(), 8);
  std::memset(bytes + codes_end, 0, static_cast<size_t>(message.numel() - codes_end));
  const EncodeCall call{
      .values = values.data_ptr(),
      .error = error ? error->data_ptr() : nullptr,
      .scales = bytes,
      .codes = bytes + 4 * blocks(numel),
      .numel = numel,
      .block_size = block_size_,
      .seed = seed,
      .is_double = values.scalar_type() == c10::kDouble,
      .keep_residual = keep_residual,
  };
  at::parallel_for(
      0, blocks(numel), std::max<int64_t>(1, kGrainElements / block_size_),
      [&](int64_t begin, int64_t end) { loops_->encode(call, begin, end); });
}

void BlockCodec::decode(
    const at::Tensor& messages, at::Tensor values, std::optional<at::Tensor> kept) const {
  check_values("values", values);
  if (kept) {
    check_companion("kept", *kept, values);
  }
  const int64_t numel = values.numel();
  TORCH_CHECK(
      messages.dim() == 2 && messages.size(0) > 0, "Expected messages as rows, found shape ",
      messages.sizes(), ".");
  check_messages(messages, numel);
  const DecodeCall call{
      .messages = messages.data_ptr<uint8_t>(),
      .message_count = messages.size(0),
      .message_stride = messages.size(1),
      .codes_offset = 4 * blocks(numel),
      .values = values.data_ptr(),
      .kept = kept ? kept->data_ptr() : nullptr,
      .numel = numel,
      .block_size = block_size_,
      .is_double = values.scalar_type() == c10::kDouble,
  };
  at::parallel_for(
      0, blocks(numel), std::max<int64_t>(1, kGrainElements / block_size_),
      [&](int64_t begin, int64_t end) { loops_->decode(call, begin, end); });
}

bool BlockCodec::is_finite(const at::Tensor& messages, int64_t numel) const {
  TORCH_CHECK(messages.dim() == 2, "Expected messages as rows, found ", messages.sizes(), ".");
  check_messages(messages, numel);
  const auto* const bytes = messages.data_ptr<uint8_t>();
  bool all = true;
  for (int64_t row = 0; row < messages.size(0); ++row) {
    for (int64_t block = 0; block < blocks(numel); ++block) {
      all &= std::isfinite(load_float(bytes + row * messages.size(1) + 4 * block));
    }
  }
  return all;
}

void BlockCodec::check_messages(const at::Tensor& messages, int64_t numel) const {
  TORCH_CHECK(
      messages.device().is_cpu() && messages.scalar_type() == c10::kByte, "Expected ",
      "messages to be uint8 on the CPU, found ", messages.scalar_type(), " on ", messages.device(),
      ".");
  TORCH_CHECK(messages.is_contiguous(), "Expected contiguous messages.");
  TORCH_CHECK(
      messages.size(-1) >= encoded_bytes(numel), "Expected messages of at least ",
      encoded_bytes(numel), " bytes for ", numel, " elements, found ", messages.size(-1), ".");
}

}  // namespace commhooks
