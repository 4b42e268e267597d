// The part of CUDA's language that the kernels in commhooks/kernels use, for g++. The same .cu
// files are compiled for the host, and their blocks and threads run one after the other.
//
// The threads of a block are fibers. A thread runs until it waits for others, at a barrier or at a
// warp collective; then the next thread runs:
//
//     thread 0   ----- __syncthreads                      -----...
//     thread 1                       ----- __syncthreads  . . . -----...
//
// Undefined behavior on a GPU is an error here: a barrier that some threads do not reach, or reach
// at another line of the source; a warp collective without all lanes of its mask. Threads can run
// in reverse order, to find dependence on their order. Concurrency of blocks and memory order are
// not emulated.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static  // one block runs at a time

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

#define COMMHOOKS_VECTOR2(T, name)     \
  struct alignas(2 * sizeof(T)) name { \
    T x, y;                            \
  };                                   \
  inline name make_##name(T x, T y) {  \
    return {x, y};                     \
  }
#define COMMHOOKS_VECTOR4(T, name)                          \
  struct alignas(sizeof(T) > 4 ? 16 : 4 * sizeof(T)) name { \
    T x, y, z, w;                                           \
  };                                                        \
  inline name make_##name(T x, T y, T z, T w) {             \
    return {x, y, z, w};                                    \
  }
COMMHOOKS_VECTOR2(float, float2)
COMMHOOKS_VECTOR2(double, double2)
COMMHOOKS_VECTOR2(int, int2)
COMMHOOKS_VECTOR2(unsigned, uint2)
COMMHOOKS_VECTOR2(unsigned short, ushort2)
COMMHOOKS_VECTOR2(long long, longlong2)
COMMHOOKS_VECTOR2(unsigned long long, ulonglong2)
COMMHOOKS_VECTOR4(float, float4)
COMMHOOKS_VECTOR4(int, int4)
COMMHOOKS_VECTOR4(unsigned, uint4)
COMMHOOKS_VECTOR4(unsigned char, uchar4)
COMMHOOKS_VECTOR4(unsigned short, ushort4)
#undef COMMHOOKS_VECTOR2
#undef COMMHOOKS_VECTOR4

namespace emulation {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 128 << 10;

// Where a thread waits, and what it brings along.
struct Stop {
  const char* what;
  const char* file;
  int line;
  bool is_block_wide;
  unsigned mask;  // of the lanes that take part, for a warp's collective

  bool matches(const Stop& other) const {
    return std::strcmp(what, other.what) == 0 && line == other.line && mask == other.mask &&
        std::strcmp(file, other.file) == 0;
  }
};

enum class State { kReady, kWaiting, kDone };

struct Thread {
  ucontext_t context;
  void* stack = nullptr;
  State state = State::kDone;
  Stop stop{};
  uint64_t given = 0;
  uint64_t received[kWarp] = {};  // of all lanes, from the last collective
  dim3 index;
};

struct Machine {
  std::mutex mutex;
  std::vector<Thread> threads;
  unsigned thread_count = 0;
  Thread* running = nullptr;
  ucontext_t scheduler;
  std::function<void()> kernel;
  bool is_backward = false;
  std::string error;
};

inline Machine machine;

}  // namespace emulation

inline dim3 gridDim, blockDim, blockIdx, threadIdx;
inline constexpr int warpSize = emulation::kWarp;

namespace emulation {

inline std::string name_of(const Thread& thread) {
  const auto place = [](const dim3& i) {
    return "(" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) +
        ")";
  };
  std::string text = "thread " + place(thread.index) + " of block " + place(blockIdx);
  if (thread.state == State::kDone) {
    return text + " has ended";
  }
  const Stop& stop = thread.stop;
  return text + " waits at " + stop.what + ", " + stop.file + ":" + std::to_string(stop.line);
}

// Waits for the other threads at `stop`, and passes `given` to each of them.
inline const uint64_t* meet(const Stop& stop, uint64_t given) {
  Thread& self = *machine.running;
  self.stop = stop;
  self.given = given;
  self.state = State::kWaiting;
  swapcontext(&self.context, &machine.scheduler);
  return self.received;
}

inline void run_thread() {
  machine.kernel();
  machine.running->state = State::kDone;
  swapcontext(&machine.running->context, &machine.scheduler);
}

inline void start(Thread& thread, unsigned number) {
  if (thread.stack == nullptr) {
    thread.stack =
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  thread.index = {
      number % blockDim.x, number / blockDim.x % blockDim.y, number / (blockDim.x * blockDim.y)};
  thread.state = State::kReady;
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = thread.stack;
  thread.context.uc_stack.ss_size = kStackBytes;
  thread.context.uc_link = nullptr;
  makecontext(&thread.context, run_thread, 0);
}

inline bool resume_ready_threads() {
  bool any = false;
  for (unsigned i = 0; i < machine.thread_count; ++i) {
    Thread& thread = machine.threads[machine.is_backward ? machine.thread_count - 1 - i : i];
    if (thread.state == State::kReady) {
      any = true;
      machine.running = &thread;
      threadIdx = thread.index;
      swapcontext(&machine.scheduler, &thread.context);
    }
  }
  return any;
}

// Releases the threads of [first, first + count) if all of them wait at `stop`: all threads of a
// block, or the lanes of a warp in `mask`.
inline bool release(unsigned first, unsigned count, const Stop& stop) {
  const auto takes_part = [&](unsigned i) {
    return stop.is_block_wide || (stop.mask >> i & 1) != 0;
  };
  uint64_t given[kWarp] = {};
  for (unsigned i = 0; i < count; ++i) {
    const Thread& thread = machine.threads[first + i];
    if (!takes_part(i)) {
      continue;
    }
    if (thread.state != State::kWaiting || !thread.stop.matches(stop)) {
      return false;
    }
    given[i % kWarp] = stop.is_block_wide ? given[0] + thread.given : thread.given;
    given[0] = stop.is_block_wide ? given[i % kWarp] : given[0];
  }
  for (unsigned i = 0; i < count; ++i) {
    if (takes_part(i)) {
      Thread& thread = machine.threads[first + i];
      std::copy(given, given + kWarp, thread.received);
      thread.state = State::kReady;
    }
  }
  return true;
}

inline bool release_waiting_threads() {
  bool any = false;
  for (unsigned i = 0; i < machine.thread_count; ++i) {
    const Thread& thread = machine.threads[i];
    if (thread.state == State::kWaiting) {
      const unsigned first = thread.stop.is_block_wide ? 0 : i / kWarp * kWarp;
      const unsigned most = thread.stop.is_block_wide ? machine.thread_count : kWarp;
      any |= release(first, std::min(most, machine.thread_count - first), Stop(thread.stop));
    }
  }
  return any;
}

inline void report_divergence() {
  const Thread* const begin = machine.threads.data();
  const Thread* const end = begin + machine.thread_count;
  const Thread* const waiting = std::find_if(
      begin, end, [](const Thread& thread) { return thread.state == State::kWaiting; });
  const Thread* const other = std::find_if(begin, end, [&](const Thread& thread) {
    return thread.state == State::kDone || !thread.stop.matches(waiting->stop);
  });
  machine.error = "divergence: " + name_of(*waiting);
  machine.error += other == end ? ", and so do the others, but not all lanes of the mask are there"
                                : "; " + name_of(*other);
}

inline bool run_block() {
  for (unsigned i = 0; i < machine.thread_count; ++i) {
    start(machine.threads[i], i);
  }
  while (resume_ready_threads()) {
    release_waiting_threads();
  }
  for (unsigned i = 0; i < machine.thread_count; ++i) {
    if (machine.threads[i].state == State::kWaiting) {
      report_divergence();
      return false;
    }
  }
  return true;
}

inline bool run_grid(dim3 grid, dim3 block) {
  gridDim = grid;
  blockDim = block;
  machine.thread_count = block.x * block.y * block.z;
  if (machine.threads.size() < machine.thread_count) {
    machine.threads.resize(machine.thread_count);
  }
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  for (uint64_t i = 0; i < blocks; ++i) {
    const uint64_t number = machine.is_backward ? blocks - 1 - i : i;
    blockIdx = {
        static_cast<unsigned>(number % grid.x), static_cast<unsigned>(number / grid.x % grid.y),
        static_cast<unsigned>(number / grid.x / grid.y)};
    if (!run_block()) {
      return false;
    }
  }
  return true;
}

// Only the last parameter may be a struct, so each one begins at the argument of its number.
template <typename... Parameters, size_t... places>
void call(
    void (*kernel)(Parameters...), void** arguments, std::index_sequence<places...> /*places*/) {
  kernel(*static_cast<std::remove_const_t<Parameters>*>(arguments[places])...);
}

// Runs a kernel. Writes the text of an error to `error`, which holds `room` bytes.
template <typename... Parameters>
int launch(
    void (*kernel)(Parameters...),
    int argument_count,
    const unsigned* grid,
    const unsigned* block,
    int is_backward,
    void** arguments,
    char* error,
    size_t room) {
  constexpr size_t bytes = (sizeof(Parameters) + ...);
  using Last = std::tuple_element_t<sizeof...(Parameters) - 1, std::tuple<Parameters...>>;
  static_assert(
      bytes % 8 == 0 && bytes - sizeof(Last) == 8 * (sizeof...(Parameters) - 1),
      "the launcher passes pointers, long long and double, and a struct of these as the last one; "
      "see commhooks/kernels/source.py");
  const std::lock_guard<std::mutex> lock(machine.mutex);
  machine.error.clear();
  machine.is_backward = is_backward != 0;
  if (argument_count * 8ul != bytes) {
    machine.error = "expected " + std::to_string(bytes / 8) + " arguments, found " +
        std::to_string(argument_count);
  } else if (block[0] * block[1] * block[2] > 1024 || grid[1] > 65535 || grid[2] > 65535) {
    machine.error = "the block or the grid is larger than a GPU allows";
  } else {
    machine.kernel = [&] { call(kernel, arguments, std::index_sequence_for<Parameters...>()); };
    run_grid({grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]});
  }
  std::snprintf(error, room, "%s", machine.error.c_str());
  return machine.error.empty() ? 0 : 1;
}

inline unsigned lane() {
  const Thread& self = *machine.running;
  return static_cast<unsigned>(&self - machine.threads.data()) % kWarp;
}

template <typename T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  return bits;
}

template <typename T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <typename T>
T shuffle(const Stop& stop, T value, unsigned source, int width) {
  const unsigned first = lane() / width * width;
  const uint64_t* const received = meet(stop, to_bits(value));
  // Beyond its part of the warp, a lane gets its own value. Lanes that take no part give any value.
  const bool is_inside = source >= first && source < first + width;
  return from_bits<T>(received[is_inside ? source : lane()]);
}

template <typename T, typename Combine>
T reduce(const Stop& stop, T value, Combine combine) {
  const uint64_t* const received = meet(stop, to_bits(value));
  T total = value;
  for (unsigned i = 0; i < kWarp; ++i) {
    if ((stop.mask >> i & 1) != 0 && i != lane()) {
      total = combine(total, from_bits<T>(received[i]));
    }
  }
  return total;
}

inline unsigned ballot(const Stop& stop, bool predicate) {
  const uint64_t* const received = meet(stop, predicate ? 1 : 0);
  unsigned bits = 0;
  for (unsigned i = 0; i < kWarp; ++i) {
    bits |= (stop.mask >> i & 1) != 0 && received[i] != 0 ? 1u << i : 0u;
  }
  return bits;
}

template <typename T>
unsigned match(const Stop& stop, T value) {
  const uint64_t* const received = meet(stop, to_bits(value));
  unsigned bits = 0;
  for (unsigned i = 0; i < kWarp; ++i) {
    bits |= (stop.mask >> i & 1) != 0 && received[i] == to_bits(value) ? 1u << i : 0u;
  }
  return bits;
}

}  // namespace emulation

// Warp collectives and barriers are macros, so that their line is known.
#define COMMHOOKS_BLOCK_STOP(what) emulation::Stop{what, __FILE__, __LINE__, true, 0}
#define COMMHOOKS_WARP_STOP(what, mask)   \
  emulation::Stop {                       \
    what, __FILE__, __LINE__, false, mask \
  }

#define __syncthreads() ((void)emulation::meet(COMMHOOKS_BLOCK_STOP("__syncthreads"), 0))
#define __syncthreads_count(predicate) \
  static_cast<int>(                    \
      *emulation::meet(COMMHOOKS_BLOCK_STOP("__syncthreads_count"), (predicate) ? 1 : 0))
#define __syncthreads_or(predicate) \
  (*emulation::meet(COMMHOOKS_BLOCK_STOP("__syncthreads_or"), (predicate) ? 1 : 0) != 0)
#define __syncthreads_and(predicate) \
  (*emulation::meet(COMMHOOKS_BLOCK_STOP("__syncthreads_and"), (predicate) ? 0 : 1) == 0)

#define COMMHOOKS_SELECT(first, chosen, ...) chosen
#define __syncwarp(...)   \
  ((void)emulation::meet( \
      COMMHOOKS_WARP_STOP("__syncwarp", COMMHOOKS_SELECT(0 __VA_OPT__(, ) __VA_ARGS__, ~0u)), 0))
#define COMMHOOKS_WIDTH(...) COMMHOOKS_SELECT(0 __VA_OPT__(, ) __VA_ARGS__, 32)
#define __shfl_sync(mask, value, source, ...)                                           \
  emulation::shuffle(                                                                   \
      COMMHOOKS_WARP_STOP("__shfl_sync", mask), value,                                  \
      emulation::lane() / COMMHOOKS_WIDTH(__VA_ARGS__) * COMMHOOKS_WIDTH(__VA_ARGS__) + \
          static_cast<unsigned>(source) % COMMHOOKS_WIDTH(__VA_ARGS__),                 \
      COMMHOOKS_WIDTH(__VA_ARGS__))
#define __shfl_xor_sync(mask, value, lanes, ...)           \
  emulation::shuffle(                                      \
      COMMHOOKS_WARP_STOP("__shfl_xor_sync", mask), value, \
      emulation::lane() ^ static_cast<unsigned>(lanes), COMMHOOKS_WIDTH(__VA_ARGS__))
#define __shfl_up_sync(mask, value, lanes, ...)           \
  emulation::shuffle(                                     \
      COMMHOOKS_WARP_STOP("__shfl_up_sync", mask), value, \
      emulation::lane() - static_cast<unsigned>(lanes), COMMHOOKS_WIDTH(__VA_ARGS__))
#define __shfl_down_sync(mask, value, lanes, ...)           \
  emulation::shuffle(                                       \
      COMMHOOKS_WARP_STOP("__shfl_down_sync", mask), value, \
      emulation::lane() + static_cast<unsigned>(lanes), COMMHOOKS_WIDTH(__VA_ARGS__))
#define __ballot_sync(mask, predicate) \
  emulation::ballot(COMMHOOKS_WARP_STOP("__ballot_sync", mask), predicate)
#define __any_sync(mask, predicate) \
  (emulation::ballot(COMMHOOKS_WARP_STOP("__any_sync", mask), predicate) != 0)
#define __all_sync(mask, predicate) \
  (emulation::ballot(COMMHOOKS_WARP_STOP("__all_sync", mask), !(predicate)) == 0)
#define __match_any_sync(mask, value) \
  emulation::match(COMMHOOKS_WARP_STOP("__match_any_sync", mask), value)
#define COMMHOOKS_REDUCE(name, mask, value, expression) \
  emulation::reduce(                                    \
      COMMHOOKS_WARP_STOP(name, mask), value, [](auto a, auto b) { return expression; })
#define __reduce_add_sync(mask, value) COMMHOOKS_REDUCE("__reduce_add_sync", mask, value, a + b)
#define __reduce_max_sync(mask, value) \
  COMMHOOKS_REDUCE("__reduce_max_sync", mask, value, std::max(a, b))
#define __reduce_min_sync(mask, value) \
  COMMHOOKS_REDUCE("__reduce_min_sync", mask, value, std::min(a, b))
#define __reduce_or_sync(mask, value) COMMHOOKS_REDUCE("__reduce_or_sync", mask, value, a | b)
#define __reduce_and_sync(mask, value) COMMHOOKS_REDUCE("__reduce_and_sync", mask, value, a& b)

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned /*nanoseconds*/) {}

// Threads run one at a time, so these are atomic.
template <typename T, typename Change>
T commhooks_exchange(T* place, Change change) {
  const T before = *place;
  *place = change(before);
  return before;
}
#define COMMHOOKS_ATOMIC(name, expression)                                                  \
  template <typename T>                                                                     \
  T name(T* place, std::type_identity_t<T> value) {                                         \
    return commhooks_exchange(place, [&](T before) { return static_cast<T>(expression); }); \
  }
COMMHOOKS_ATOMIC(atomicAdd, before + value)
COMMHOOKS_ATOMIC(atomicSub, before - value)
COMMHOOKS_ATOMIC(atomicMax, std::max(before, value))
COMMHOOKS_ATOMIC(atomicMin, std::min(before, value))
COMMHOOKS_ATOMIC(atomicOr, before | value)
COMMHOOKS_ATOMIC(atomicAnd, before& value)
COMMHOOKS_ATOMIC(atomicXor, before ^ value)
COMMHOOKS_ATOMIC(atomicExch, ((void)before, value))
#undef COMMHOOKS_ATOMIC
template <typename T>
T atomicCAS(T* place, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return commhooks_exchange(place, [&](T before) { return before == expected ? value : before; });
}

template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, std::type_identity_t<T> value) {
  *to = value;
}
template <typename T>
void __stcg(T* to, std::type_identity_t<T> value) {
  *to = value;
}

inline int __popc(unsigned value) {
  return __builtin_popcount(value);
}
inline int __popcll(unsigned long long value) {
  return __builtin_popcountll(value);
}
inline int __clz(int value) {
  return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value));
}
inline int __clzll(long long value) {
  return value == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(value));
}
inline int __ffs(int value) {
  return __builtin_ffs(value);
}
inline int __ffsll(long long value) {
  return __builtin_ffsll(value);
}
inline unsigned __float_as_uint(float value) {
  return emulation::from_bits<unsigned>(emulation::to_bits(value));
}
inline float __uint_as_float(unsigned bits) {
  return emulation::from_bits<float>(bits);
}
inline int __float_as_int(float value) {
  return emulation::from_bits<int>(emulation::to_bits(value));
}
inline float __int_as_float(int bits) {
  return emulation::from_bits<float>(emulation::to_bits(bits));
}
inline long long __double_as_longlong(double value) {
  return emulation::from_bits<long long>(emulation::to_bits(value));
}
inline double __longlong_as_double(long long bits) {
  return emulation::from_bits<double>(emulation::to_bits(bits));
}
inline bool isfinite(float value) {
  return std::isfinite(value);
}
inline bool isfinite(double value) {
  return std::isfinite(value);
}

using std::max;
using std::min;
