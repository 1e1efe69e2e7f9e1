// CUDA's bfloat16 on the host.
#pragma once

#include <cuda_runtime.h>

#include "step/convert.h"

struct __nv_bfloat16 {
  fastamp::BFloat16 value;
};

inline float __bfloat162float(__nv_bfloat16 x) { return fastamp::to_float(x.value); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  __nv_bfloat16 rounded;
  fastamp::from_float(x, &rounded.value);
  return rounded;
}
