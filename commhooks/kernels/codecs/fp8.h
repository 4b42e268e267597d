// 8-bit floating point: the two formats of Micikevicius et al. 2022, "FP8 formats for deep
// learning".
//
//              sign  exponent  mantissa  bias  largest
//     e4m3        1         4         3     7      448   as torch.float8_e4m3fn: no infinity
//     e5m2        1         5         2    15    57344   as torch.float8_e5m2
#pragma once

#include "codecs/small_float.h"

namespace commhooks::codecs {

using E4M3 = BlockFloat<E4M3Format>;
using E5M2 = BlockFloat<E5M2Format>;

}  // namespace commhooks::codecs
