#include "shared/instruction_sets.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>

namespace commhooks {

// In the order of InstructionSet.
std::vector<std::string> instruction_sets() {
#ifdef COMMHOOKS_X86
  if (__builtin_cpu_supports("x86-64-v4")) {
    return {"plain", "avx2", "avx512"};
  }
  if (__builtin_cpu_supports("x86-64-v3")) {
    return {"plain", "avx2"};
  }
#endif
  return {"plain"};
}

namespace {

std::atomic<InstructionSet>& chosen() {
  static std::atomic<InstructionSet> set(
      static_cast<InstructionSet>(instruction_sets().size() - 1));
  return set;
}

}  // namespace

InstructionSet instruction_set() {
  return chosen().load(std::memory_order_relaxed);
}

void use_instruction_set(const std::string& name) {
  const std::vector<std::string> names = instruction_sets();
  const auto found = std::find(names.begin(), names.end(), name);
  TORCH_CHECK(
      found != names.end(), "Expected an instruction set that this CPU supports, ",
      c10::Join(", ", names), "; found '", name, "'.");
  chosen() = static_cast<InstructionSet>(found - names.begin());
}

}  // namespace commhooks
