// Encodes gradients as blocks of codes with one scale each, and averages what others have encoded.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace commhooks {

// Numbers, cut into parts of equal length, of which the last ones may have fewer or none; and parts
// into blocks. Blocks are counted through all parts.
struct Parts {
  int64_t numel;
  int64_t part_length;
  int64_t block_size;

  int64_t blocks_per_part() const {
    return (part_length + block_size - 1) / block_size;
  }
};

// Some blocks of one encoding. Scales and codes lie in a message without alignment.
struct EncodeCall {
  Parts parts;
  void* values;
  const void* error;  // may be null
  uint8_t* messages;  // one per part
  int64_t message_bytes;
  int64_t codes_offset;
  uint64_t seed;
  bool is_double;
  bool keep_residual;
};

// Some blocks, each of which several messages tell.
struct DecodeCall {
  Parts parts;
  const uint8_t* messages;
  int64_t message_bytes;
  int64_t codes_offset;
  int64_t message_count;  // per part; those of one part follow each other
  void* values;
  void* kept;  // may be null
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

// The message of a part of n values is, in bytes:
//
//     | scales: 4 per block, float32 | codes: ceil(n * bits / 8) | zeros up to a multiple of 4 |
//
// A part with fewer values than the others has a message of the same length, with zeros where they
// would be. All tensors are on the CPU; values, error and kept are 1-D, contiguous, and of one dtype,
// float32 or float64, while scales, codes and sums of what was decoded are float32. Results do not
// depend on the number of threads, nor on the machine: commhooks/kernels/block_codec.cu gives the same.
class CpuBlockCodec {
 public:
  CpuBlockCodec(std::unique_ptr<BlockLoops> loops, int64_t block_size);

  // Of the message of a part.
  int64_t encoded_bytes(int64_t part_length) const;

  // Row i of `messages` becomes the message of part i of values + error. If `keep_residual`, values
  // become what the messages leave out; else they stay.
  void encode(
      at::Tensor values,
      at::Tensor messages,
      int64_t part_length,
      const std::optional<at::Tensor>& error,
      uint64_t seed,
      bool keep_residual) const;

  // values = mean over the rows of `messages`, each of the same part.
  void average(const at::Tensor& messages, at::Tensor values, int64_t part_length) const;

  // If all scales are finite, part i of values = row i of `messages`, kept = what values were before,
  // and the result is true; else values = NaN.
  bool assemble(
      const at::Tensor& messages,
      at::Tensor values,
      int64_t part_length,
      std::optional<at::Tensor> kept) const;

 private:
  Parts parts_of(const at::Tensor& values, int64_t part_length, const at::Tensor& messages) const;
  void decode(const DecodeCall& call, int64_t blocks) const;
  int64_t grain() const;  // blocks that are worth a thread

  std::unique_ptr<BlockLoops> loops_;
  int64_t block_size_;
};

}  // namespace commhooks
