// Encodes numbers as blocks of codes with one scale each, and decodes them. The messages are the
// same as those of the C++ loops on the CPU, byte for byte; the arithmetic is in codecs/.
//
// Note [Teams]
//
// A team of threads holds a block in registers, so that the block is read once. Each thread holds
// 16 numbers as four quads of 16 bytes. Neighboring threads hold neighboring quads, so that a warp
// accesses whole sectors of memory:
//
//     block size     team                  a thread block has
//     32 .. 512      2 .. 32 lanes         several teams
//     544 .. 4096    2 .. 8 warps          one; a warp holds a chunk of 512 numbers
//
// The y axis of the grid counts the parts of the numbers, the x axis the blocks of a part.
#include "codecs/formats.h"
#include "vector.h"

using namespace commhooks::codecs;  // also for template arguments: kernels/source.py

namespace commhooks::kernels {
namespace {

constexpr int kThreads = 256;  // the most per thread block
// Thread blocks per multiprocessor: enough that some read while others compute. Three leave 80
// registers per thread; codes of two bits need more and would spill.
template <typename Codec, typename T>
constexpr int kBlocks = sizeof(T) == 4 && Codec::kBits != 2 ? 3 : 2;
// Messages that a thread reads before it uses the first. Floats take so many registers to decode
// that with two of them fewer blocks would run, which is slower.
template <typename Codec>
constexpr int kMessagesAhead = Codec::kGroup > 0 ? 1 : 2;
template <int bits, int mantissa, int bias, int largest>
constexpr int kMessagesAhead<BlockFloat<bits, mantissa, bias, largest>> = 1;
constexpr int kQuad = 4;
constexpr int kSlots = 4;  // quads per thread
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
static_assert(kQuad * kSlots * kWarp == kChunk, "a chunk is what a warp holds");

// How numbers are divided into parts and blocks.
struct Partition {
  i64 numel;
  i64 part_length;
  i64 blocks;  // per part
  int block_size;
  int lane_bits;  // a team has 2^lane_bits lanes of a warp
};

// The share of one thread in its block.
struct Share {
  i64 part;
  i64 block;   // index in the part
  i64 offset;  // of the block's first number in the part
  i64 first;   // index of that number among all numbers
  int count;   // numbers in the block; 0 for a thread without a block
  int lane;
  int lanes;
  int chunk;
  int first_quad;

  __device__ bool has_block(const Partition& partition) const {
    return block < partition.blocks;
  }
  __device__ int quad(int slot) const {
    return first_quad + slot * lanes;
  }
};

__device__ Share share_of(const Partition& partition) {
  Share share;
  const bool is_wide = partition.block_size > kChunk;
  share.lanes = 1 << partition.lane_bits;
  share.lane = (int)threadIdx.x & (share.lanes - 1);
  share.chunk = is_wide ? (int)threadIdx.x / kWarp : 0;
  share.part = blockIdx.y;
  share.block = is_wide ? (i64)blockIdx.x
                        : (i64)blockIdx.x * (blockDim.x >> partition.lane_bits) +
          (threadIdx.x >> partition.lane_bits);
  share.offset = share.block * partition.block_size;
  share.first = share.part * partition.part_length + share.offset;
  const i64 left = min(partition.part_length - share.offset, partition.numel - share.first);
  share.count = (int)max((i64)0, min(left, (i64)partition.block_size));
  share.first_quad = share.chunk * (kChunk / kQuad) + share.lane;
  return share;
}

// Copies a quad from or to memory, 16 bytes at a time.
template <typename T>
__device__ void copy_quad(const T* from, T* to) {
  using Part = Vector<T>;
#pragma unroll
  for (int i = 0; i < kQuad; i += Part::size) {
    *reinterpret_cast<Part*>(to + i) = *reinterpret_cast<const Part*>(from + i);
  }
}

// Calls `body(slot, i)` for all numbers of a thread.
template <typename Body>
__device__ void for_numbers(const Body& body) {
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      body(slot, i);
    }
  }
}

// Calls `copy_all(slot, at)` for quads of the block at `begin` that are copied as a whole, and
// `copy_one(slot, i, at)` for the numbers of others.
template <typename T, typename CopyAll, typename CopyOne>
__device__ void for_quads(
    const T* begin,
    const Share& share,
    const Partition& partition,
    const CopyAll& copy_all,
    const CopyOne& copy_one) {
  // The block must be full and aligned to 16 bytes.
  const bool in_quads =
      share.count == partition.block_size && reinterpret_cast<u64>(begin) % 16 == 0;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    const int at = kQuad * share.quad(slot);
    if (in_quads) {
      if (at < share.count) {
        copy_all(slot, at);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        if (at + i < share.count) {
          copy_one(slot, i, at + i);
        }
      }
    }
  }
}

// Loads this thread's numbers of a block, and zeros beyond its end.
template <typename T>
__device__ void load(
    const T* begin, const Share& share, const Partition& partition, T (&x)[kSlots][kQuad]) {
  for_numbers([&](int slot, int i) { x[slot][i] = 0; });
  for_quads(
      begin, share, partition, [&](int slot, int at) { copy_quad(begin + at, x[slot]); },
      [&](int slot, int i, int at) { x[slot][i] = begin[at]; });
}

template <typename T>
__device__ void store(
    T* begin, const Share& share, const Partition& partition, const T (&x)[kSlots][kQuad]) {
  for_quads(
      begin, share, partition, [&](int slot, int at) { copy_quad(x[slot], begin + at); },
      [&](int slot, int i, int at) { begin[at] = x[slot][i]; });
}

// Returns the bits of the block's largest magnitude, or of its largest positive number or 0. All
// threads of the thread block must call it.
template <bool positive, typename T>
__device__ u32
largest_of(const T (&x)[kSlots][kQuad], const Share& share, const Partition& partition) {
  u32 largest = 0;
  for_numbers([&](int slot, int i) {
    const float number = (float)x[slot][i];
    largest = max(largest, positive && !(number > 0.0f) ? 0u : magnitude_bits(number));
  });
  for (int step = share.lanes / 2; step > 0; step /= 2) {
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, step));
  }
  if (partition.block_size > kChunk) {
    __shared__ u32 of_chunk[kMaxChunks];
    if (share.lane == 0) {
      of_chunk[share.chunk] = largest;
    }
    __syncthreads();
    for (int chunk = 0; chunk < (int)blockDim.x / kWarp; ++chunk) {
      largest = max(largest, of_chunk[chunk]);
    }
  }
  return largest;
}

// See Note [Order of sums]. All threads of the thread block must call it.
template <bool squares, typename T>
__device__ float sum_of_ratios(
    const T (&x)[kSlots][kQuad], const Share& share, const Partition& partition, float largest) {
  const float inverse = 1.0f / largest;
  float sums[kQuad];
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    float terms[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const bool is_there = kQuad * share.quad(slot) + i < share.count;
      terms[slot] = is_there ? sum_term<squares>((float)x[slot][i], inverse) : 0.0f;
    }
    sums[i] = (terms[0] + terms[2]) + (terms[1] + terms[3]);
  }
  for (int step = share.lanes / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      sums[i] += __shfl_xor_sync(kAllLanes, sums[i], step);
    }
  }
  const float sum = (sums[0] + sums[2]) + (sums[1] + sums[3]);
  if (partition.block_size <= kChunk) {
    return sum;
  }
  __shared__ float of_chunk[kMaxChunks];
  if (threadIdx.x < kMaxChunks) {
    of_chunk[threadIdx.x] = 0.0f;
  }
  __syncthreads();
  if (share.lane == 0) {
    of_chunk[share.chunk] = sum;
  }
  __syncthreads();
  const float* const t = of_chunk;
  return ((t[0] + t[4]) + (t[2] + t[6])) + ((t[1] + t[5]) + (t[3] + t[7]));
}

template <typename T>
__device__ float norm_of(
    Norm norm,
    const T (&x)[kSlots][kQuad],
    const Share& share,
    const Partition& partition,
    float largest) {
  if (norm == Norm::kLargest) {
    return largest;
  }
  if (norm == Norm::kSigned) {
    const u32 positive = largest_of<true>(x, share, partition);
    return positive == bits_of(largest) ? largest : -largest;
  }
  const float sum = sums_squares(norm) ? sum_of_ratios<true>(x, share, partition, largest)
                                       : sum_of_ratios<false>(x, share, partition, largest);
  return norm_from(norm, largest, sum, share.count);
}

// Stores the codes of one quad, lowest bits first. All lanes of a warp must call it.
template <int bits>
__device__ void store_codes(u8* codes, int quad, u32 four, bool is_in_room) {
  if constexpr (bits == 1) {
    const u32 next = __shfl_down_sync(kAllLanes, four, 1);
    if (is_in_room && quad % 2 == 0) {
      codes[quad / 2] = (u8)(four | next << 4);
    }
  } else if (is_in_room) {
    if constexpr (bits == 2) {
      codes[quad] = (u8)four;
    } else if constexpr (bits == 4) {
      reinterpret_cast<unsigned short*>(codes)[quad] = (unsigned short)four;
    } else {
      reinterpret_cast<u32*>(codes)[quad] = four;
    }
  }
}

template <int bits>
__device__ u32 load_codes(const u8* codes, int quad) {
  if constexpr (bits == 1) {
    return (u32)codes[quad / 2] >> (quad % 2 * 4) & 15u;
  } else if constexpr (bits == 2) {
    return codes[quad];
  } else if constexpr (bits == 4) {
    return reinterpret_cast<const unsigned short*>(codes)[quad];
  } else {
    return reinterpret_cast<const u32*>(codes)[quad];
  }
}

template <int bits>
__device__ u32 code_of(u32 four, int i) {
  return four >> (bits * i) & ((1u << bits) - 1);
}

// Where the codes of a message begin. The scales of groups are before them.
template <typename Codec>
__device__ i64 codes_offset(const Partition& partition) {
  i64 offset = 4 * partition.blocks;
  if constexpr (Codec::kGroup > 0) {
    offset += (partition.part_length + 4 * Codec::kGroup - 1) / (4 * Codec::kGroup) * 4;
  }
  return offset;
}

// Returns the code of the scale of this thread's group in one slot, or 0 if it has no numbers, and
// stores it. Neighboring lanes have the quads of a group. All lanes of a warp must call it.
template <typename Codec, typename T>
__device__ u32 encode_group(
    const Codec& codec,
    const T (&quad)[kQuad],
    int at,
    bool has_scale,
    float inverse,
    u8* groups,
    i64 room,
    const Share& share) {
  constexpr int lanes = Codec::kGroup / kQuad;
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    largest = max(largest, magnitude_bits((float)quad[i]));
  }
#pragma unroll
  for (int step = 1; step < lanes; step *= 2) {
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, step));
  }
  const int group = at / Codec::kGroup;
  const bool has_numbers = group * Codec::kGroup < share.count;
  const u32 code = has_scale && has_numbers ? codec.group_code(float_of(largest) * inverse) : 0;
  if (at % Codec::kGroup == 0 && group < room) {
    groups[group] = (u8)code;
  }
  return code;
}

}  // namespace

// Encodes values + error into messages of shape (parts, message_bytes), where message_bytes is a
// multiple of 4. error may be null. With keep_residual, values become what the messages leave out.
template <typename Codec, typename T>
__global__ void __launch_bounds__(kThreads, kBlocks<Codec, T>) encode(
    T* values,
    i64 numel,
    i64 part_length,
    i64 blocks,
    i64 block_size,
    i64 lane_bits,
    const T* error,
    u8* messages,
    i64 message_bytes,
    i64 seed,
    i64 keep_residual,
    i64 norm,
    double levels,
    double clip) {
  constexpr int bits = Codec::kBits;
  const Partition partition{numel, part_length, blocks, (int)block_size, (int)lane_bits};
  const Share share = share_of(partition);
  Codec codec{};
  configure(codec, {(Norm)norm, (float)levels, (float)clip});

  alignas(16) T x[kSlots][kQuad];
  load(values + share.first, share, partition, x);
  if (error != nullptr) {
    alignas(16) T added[kSlots][kQuad];
    load(error + share.first, share, partition, added);
    for_numbers([&](int slot, int i) { x[slot][i] += added[slot][i]; });
  }

  const u32 largest = largest_of<false>(x, share, partition);
  // Unused if the block has no scale, but all lanes of a warp must take part in the sum.
  const float size = norm_of(codec.norm, x, share, partition, float_of(largest));
  const bool has_scale = codecs::has_scale(largest);
  const float scale = has_scale ? codec.scale(float_of(largest), size) : scale_without(largest);
  const float inverse = 1.0f / scale;

  u8* const message = messages + share.part * message_bytes;
  const i64 begin = codes_offset<Codec>(partition);
  u8* const codes = message + begin + share.block * (partition.block_size * bits / 8);
  // A part with fewer numbers has room for as many codes as the others.
  const i64 room = (message_bytes - begin) * 8 / bits - share.offset;
  const Random random = random_for((u64)seed, (u64)share.first);
  u32 fours[kSlots];
  float scales[kSlots];
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    const int at = kQuad * share.quad(slot);
    float of_number = inverse;
    scales[slot] = scale;
    if constexpr (Codec::kGroup > 0) {
      const i64 first_group = share.offset / Codec::kGroup;
      const i64 groups_room = share.has_block(partition) && at < partition.block_size
          ? begin - 4 * blocks - first_group
          : 0;
      const u32 code = encode_group(
          codec, x[slot], at, has_scale, inverse, message + 4 * blocks + first_group, groups_room,
          share);
      const float group_scale = codec.group_scale(code);
      of_number = group_inverse(inverse, group_scale);
      scales[slot] = group_scale * scale;
    }
    u32 four = 0;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (has_scale && at + i < share.count) {
        const float ratio = (float)x[slot][i] * of_number;
        four |= codec.code(ratio, random, (u32)share.first + (u32)(at + i)) << (bits * i);
      }
    }
    const bool is_in_room = share.has_block(partition) && at < partition.block_size && at < room;
    store_codes<bits>(codes, share.quad(slot), four, is_in_room);
    fours[slot] = four;
  }
  if (share.has_block(partition) && share.lane == 0 && share.chunk == 0) {
    *reinterpret_cast<float*>(message + 4 * share.block) = scale;
  }
  if (keep_residual == 0) {
    return;
  }
  for_numbers([&](int slot, int i) {
    const float value = codec.value(code_of<bits>(fours[slot], i)) * scales[slot];
    x[slot][i] -= has_scale ? (T)value : (T)0;
  });
  store(values + share.first, share, partition, x);
}

// Decodes to `values` the mean, or the majority vote, of the `count` consecutive messages of each
// part. Copies the previous values to `kept`, unless it is null. If `finite` is not null and points
// to 0, writes NaN instead and does not change `kept`.
template <typename Codec, typename T>
__global__ void __launch_bounds__(kThreads) decode(
    T* values,
    i64 numel,
    i64 part_length,
    i64 blocks,
    i64 block_size,
    i64 lane_bits,
    const u8* messages,
    i64 count,
    i64 message_bytes,
    T* kept,
    const u8* finite,
    i64 is_vote) {
  constexpr int bits = Codec::kBits;
  const Partition partition{numel, part_length, blocks, (int)block_size, (int)lane_bits};
  const Share share = share_of(partition);
  if (share.count == 0) {
    return;
  }
  const Codec codec{};
  T* const begin = values + share.first;
  const bool is_finite = finite == nullptr || *finite != 0;
  if (kept != nullptr && is_finite) {
    alignas(16) T before[kSlots][kQuad];
    load(begin, share, partition, before);
    store(kept + share.first, share, partition, before);
  }

  float sums[kSlots][kQuad];
  // The neutral element of addition, unlike 0.0f.
  for_numbers([&](int slot, int i) { sums[slot][i] = -0.0f; });
  const float of_each = 1.0f / (float)count;
  float mean_scale = 0.0f;
#pragma unroll kMessagesAhead < Codec>
  for (i64 k = 0; k < count; ++k) {
    const u8* const message = messages + (share.part * count + k) * message_bytes;
    const u8* const codes =
        message + codes_offset<Codec>(partition) + share.block * (partition.block_size * bits / 8);
    const float scale = *reinterpret_cast<const float*>(message + 4 * share.block);
    const float share_of_scale = scale * of_each;
    const float vote = scale == 0.0f ? 0.0f : 1.0f;
    const float weight = is_vote != 0 ? vote : share_of_scale;
    mean_scale += share_of_scale;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const int quad = share.quad(slot);
      const bool is_there = kQuad * quad < share.count;
      const u32 four = is_there ? load_codes<bits>(codes, quad) : 0;
      float of_number = weight;
      if constexpr (Codec::kGroup > 0) {
        const i64 group = (share.offset + kQuad * quad) / Codec::kGroup;
        of_number = codec.group_scale(is_there ? message[4 * blocks + group] : 0) * weight;
      }
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        sums[slot][i] += codec.value(code_of<bits>(four, i)) * of_number;
      }
    }
  }

  alignas(16) T x[kSlots][kQuad];
  for_numbers([&](int slot, int i) {
    const float voted =
        is_vote != 0 ? codecs::clamp(sums[slot][i], 1.0f) * mean_scale : sums[slot][i];
    x[slot][i] = (T)(is_finite ? voted : float_of(0x7fc00000u));
  });
  store(begin, share, partition, x);
}

// Sets *finite to 0 if a scale of any message is not finite. The y axis of the grid counts the
// messages, the x axis the scales of a message.
__global__ void __launch_bounds__(kThreads)
    find_not_finite(const u8* messages, i64 message_bytes, i64 blocks, u8* finite) {
  const i64 block = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (block >= blocks) {
    return;
  }
  const u8* const message = messages + blockIdx.y * message_bytes;
  const float scale = *reinterpret_cast<const float*>(message + 4 * block);
  if (magnitude_bits(scale) >= 0x7f800000u) {
    *finite = 0;  // all threads that write it write the same value
  }
}

}  // namespace commhooks::kernels
