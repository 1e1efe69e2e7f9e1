// The device's element types, and its conversions of the 16-bit ones, which round as the host's do.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "step/convert.h"

namespace fastamp {

__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

__device__ inline void from_float(float x, __nv_bfloat16* out) { *out = __float2bfloat16_rn(x); }
__device__ inline void from_float(float x, __half* out) { *out = __float2half_rn(x); }

template <typename Fn>
__device__ auto visit_format(Format format, Fn fn) {
  return visit_types<__nv_bfloat16, __half>(format, fn);
}

}  // namespace fastamp
