// Loops that are compiled once per instruction set; the CPU runs the widest one that it supports:
//
//     on_widest([&](auto set) COMMHOOKS_ALWAYS_INLINE { add<decltype(set)>(values, error, numel);
//     });
//
// Functions that such a body calls have to be COMMHOOKS_INLINE; others are compiled for any CPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define COMMHOOKS_X86 1
#endif
// Compiles a function for the instruction set of its caller.
#define COMMHOOKS_ALWAYS_INLINE __attribute__((always_inline))
#define COMMHOOKS_INLINE inline COMMHOOKS_ALWAYS_INLINE

namespace commhooks {

// Types, so that loops can be overloaded. kFloats is the number of floats in a register.
struct Plain {
  static constexpr int kFloats = 4;
};
struct Avx2 {
  static constexpr int kFloats = 8;
};
struct Avx512 {
  static constexpr int kFloats = 16;
};

enum class InstructionSet { kPlain, kAvx2, kAvx512 };

// Returns the widest one that this CPU supports, unless another one was chosen.
InstructionSet instruction_set();

// The names of those that this CPU supports, the widest last, and the choice of one for all loops
// that are linked with this file, for the whole process. Tests compare their results.
std::vector<std::string> instruction_sets();
void use_instruction_set(const std::string& name);

#ifdef COMMHOOKS_X86
template <typename Body>
__attribute__((target("arch=x86-64-v4"))) auto on_avx512(const Body& body) {
  return body(Avx512());
}

template <typename Body>
__attribute__((target("arch=x86-64-v3"))) auto on_avx2(const Body& body) {
  return body(Avx2());
}
#endif

template <typename Body>
auto on_widest(const Body& body) {
#ifdef COMMHOOKS_X86
  switch (instruction_set()) {
    case InstructionSet::kAvx512:
      return on_avx512(body);
    case InstructionSet::kAvx2:
      return on_avx2(body);
    case InstructionSet::kPlain:
      break;
  }
#endif
  return body(Plain());
}

}  // namespace commhooks
