// Encodes gradients as blocks of codes with one scale each, and averages the messages of several
// ranks.
#pragma once

#include "kernels/codecs/block.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace commhooks {

// Numbers, divided into parts of equal length and parts into blocks. The last parts may have fewer
// elements or none. Blocks are numbered over all parts.
struct Parts {
  int64_t numel;
  int64_t part_length;
  int64_t block_size;
  int64_t blocks_per_part = (part_length + block_size - 1) / block_size;

  // Where a message has the scales of groups, behind those of blocks.
  int64_t groups_offset() const {
    return 4 * blocks_per_part;
  }

  // Where it has the codes, behind a byte per group of `group` numbers and zeros up to a multiple
  // of 4 bytes; 0: there are no groups.
  int64_t codes_offset(int64_t group) const {
    return groups_offset() + (group == 0 ? 0 : (part_length + 4 * group - 1) / (4 * group) * 4);
  }
};

// The arguments of encoding. Scales and codes in a message are not aligned.
struct EncodeCall {
  Parts parts;
  void* values;
  const void* error;  // may be null
  uint8_t* messages;  // one per part
  int64_t message_bytes;
  uint64_t seed;
  bool is_double;
  bool keep_residual;
};

// The arguments of decoding; several messages may have the same block.
struct DecodeCall {
  Parts parts;
  const uint8_t* messages;
  int64_t message_bytes;
  int64_t message_count;  // per part; the messages of one part are consecutive
  void* values;
  void* kept;  // may be null
  bool is_double;
};

// The loops over blocks [begin, end) for one codec.
struct BlockLoops {
  std::function<void(const EncodeCall&, int64_t begin, int64_t end)> encode;
  std::function<void(const DecodeCall&, int64_t begin, int64_t end)> decode;
};

// A declaration of commhooks/codecs/formats.py.
struct Format {
  std::string codes;  // the name of a struct in kernels/codecs/formats.h
  int bits;
  int group;
  codecs::Norm norm;
  float levels;
  float clip;
  bool is_vote;  // several messages are decoded to the sign that most of them have, times their
                 // mean scale, and to zero if there are as many of each
};

// Each returns nothing for the formats of the others. They are compiled apart, in parallel.
std::optional<BlockLoops> level_loops(const Format& format);
std::optional<BlockLoops> float_loops(const Format& format);
std::optional<BlockLoops> sign_loops(const Format& format);

// The form of messages is that of BlockCodec in commhooks/codecs/block.py, which checks the
// arguments: all tensors are on the CPU and contiguous; values, error and kept are flat, and have
// the same dtype, float32 or float64; messages have one row per part. Scales, codes and sums of
// decoded numbers are float32. Results depend neither on the number of threads nor on the machine:
// commhooks/kernels/block_codec.cu computes the same bytes.
class CpuBlockCodec {
 public:
  CpuBlockCodec(const Format& format, int64_t block_size);

  // Writes the message of part i of values + error to row i of `messages`. If `keep_residual`, the
  // error of the encoding is written to values; otherwise values do not change.
  void encode(
      const at::Tensor& values,
      const at::Tensor& messages,
      int64_t part_length,
      const std::optional<at::Tensor>& error,
      uint64_t seed,
      bool keep_residual) const;

  // Sets values to the mean of the rows of `messages`, which all have the same part.
  void average(const at::Tensor& messages, const at::Tensor& values, int64_t part_length) const;

  // If all scales are finite, decodes row i of `messages` to part i of values, copies the former
  // values to kept, and returns true. Otherwise sets values to NaN and returns false.
  bool assemble(
      const at::Tensor& messages,
      const at::Tensor& values,
      int64_t part_length,
      const std::optional<at::Tensor>& kept) const;

 private:
  // Decodes to each part its `count` consecutive messages.
  void decode(
      const at::Tensor& messages,
      int64_t count,
      const at::Tensor& values,
      int64_t part_length,
      void* kept) const;
  int64_t grain() const;  // the least number of blocks for one thread

  std::optional<BlockLoops> loops_;
  int64_t block_size_;
};

}  // namespace commhooks
