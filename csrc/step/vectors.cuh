// The device's element types, whose conversions round as the host's do, and vectors of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "step/convert.h"

namespace fastamp {

constexpr int kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffffU;

__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

__device__ inline void from_float(float x, __nv_bfloat16* out) { *out = __float2bfloat16_rn(x); }
__device__ inline void from_float(float x, __half* out) { *out = __float2half_rn(x); }

/// The one place that turns a Format into a device type.
template <typename Fn>
__device__ auto visit_format(Format format, Fn fn) {
  if (format == Format::kBFloat16) return fn(__nv_bfloat16{});
  if (format == Format::kFloat16) return fn(__half{});
  return fn(float{});
}

// A thread has four neighboring elements of each tensor in flight, the 16 bytes of a float32
// vector or 8. Memory that gives 5 TB/s after 0.7 us to 132 multiprocessors needs 27 KB in flight
// on each. Adam's four tensors have 64 or 32 bytes a thread, so 1,024 threads ask for 64 or 32 KB.
constexpr int kVector = 4;

template <typename T>
struct alignas(kVector * sizeof(T)) Four {
  T values[kVector];
};

template <typename T>
__device__ bool is_aligned(const T* data) {
  return reinterpret_cast<std::uintptr_t>(data) % (kVector * sizeof(T)) == 0;
}

/// A thread's elements of one tensor, as they lie in memory.
union Raw {
  unsigned char bytes[16] = {};
  Four<float> wide;
  Four<__nv_bfloat16> bfloats;
  Four<__half> halves;
  Four<std::uint8_t> codes;

  __device__ Four<float>& of(float) { return wide; }
  __device__ Four<__nv_bfloat16>& of(__nv_bfloat16) { return bfloats; }
  __device__ Four<__half>& of(__half) { return halves; }
  __device__ Four<std::uint8_t>& of(std::uint8_t) { return codes; }
};

}  // namespace fastamp
