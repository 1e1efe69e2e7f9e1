// CUDA's float16 on the host.
#pragma once

#include <cuda_runtime.h>

#include "step/convert.h"

struct __half {
  fastamp::Float16 value;
};

inline float __half2float(__half x) { return fastamp::to_float(x.value); }
inline __half __float2half_rn(float x) {
  __half rounded;
  fastamp::from_float(x, &rounded.value);
  return rounded;
}
