// Functions that the compiler makes once per instruction set; the loader picks one on the machine at
// hand.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define COMMHOOKS_X86 1
#define COMMHOOKS_MULTIVERSIONED \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define COMMHOOKS_MULTIVERSIONED
#endif
// So that templates are compiled for the instruction set of the function that calls them.
#define COMMHOOKS_INLINE inline __attribute__((always_inline))
