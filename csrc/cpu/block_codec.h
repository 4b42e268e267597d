// Encodes gradients as blocks of codes with one scale each, and averages what others have encoded.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace commhooks {

// Some blocks of one encoding. Scales and codes lie in a message without alignment.
struct EncodeCall {
  void* values;
  const void* error;  // may be null
  uint8_t* scales;
  uint8_t* codes;
  int64_t numel;
  int64_t block_size;
  uint64_t seed;
  bool is_double;
  bool keep_residual;
};

struct DecodeCall {
  const uint8_t* messages;
  int64_t message_count;
  int64_t message_stride;
  int64_t codes_offset;
  void* values;
  void* kept;  // may be null
  int64_t numel;
  int64_t block_size;
  bool is_double;
};

// The loops over blocks [begin, end) of one family of codecs.
class BlockLoops {
 public:
  virtual ~BlockLoops() = default;
  virtual int64_t bits() const = 0;
  virtual void encode(const EncodeCall& call, int64_t begin, int64_t end) const = 0;
  virtual void decode(const DecodeCall& call, int64_t begin, int64_t end) const = 0;
};

// norm: "max" or "l2". clip: the largest number kept, in root mean squares of the block, with "max"
std::unique_ptr<BlockLoops> level_loops(
    int64_t bits, int64_t levels, const std::string& norm, double clip, bool stochastic);
// format: "e4m3" or "e5m2"
std::unique_ptr<BlockLoops> fp8_loops(const std::string& format);
std::unique_ptr<BlockLoops> natural_loops();
// norm: "mean" or "root_mean". majority: several messages are decoded to the sign that most of them
// have, times their mean scale; to zero where they are in balance.
std::unique_ptr<BlockLoops> sign_loops(const std::string& norm, bool majority);

// The message of `numel` values is, in bytes:
//
//     | scales: 4 per block, float32 | codes: ceil(numel * bits / 8) | zeros up to a multiple of 4 |
//
// All tensors are on the CPU; values, error and kept are 1-D, contiguous, and of one dtype, float32 or
// float64, while scales, codes and sums of what was decoded are float32. Results do not depend on the
// number of threads.
class BlockCodec {
 public:
  BlockCodec(std::unique_ptr<BlockLoops> loops, int64_t block_size);

  int64_t encoded_bytes(int64_t numel) const;

  // Writes the message of values + error, and zeros behind it up to the end of `message`. If
  // `keep_residual`, values become what the message leaves out; else they stay.
  void encode(
      at::Tensor values,
      at::Tensor message,
      const std::optional<at::Tensor>& error,
      uint64_t seed,
      bool keep_residual) const;

  // values = mean over the rows of `messages`, and kept = what values were before.
  void decode(const at::Tensor& messages, at::Tensor values, std::optional<at::Tensor> kept) const;

  // Whether every scale in every row of messages of `numel` values is.
  bool is_finite(const at::Tensor& messages, int64_t numel) const;

 private:
  int64_t blocks(int64_t numel) const;
  void check_messages(const at::Tensor& messages, int64_t numel) const;

  std::unique_ptr<BlockLoops> loops_;
  int64_t block_size_;
};

}  // namespace commhooks
