// The device's element types, whose conversions round as the host's do; and parts of tensors in
// vectors: a thread loads four neighboring elements of each tensor that an update needs, all of
// them before it uses the first.
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

/// Reads the first `count` elements, four at most. Misaligned ones are read one by one; the next
/// ones come from the cache.
template <typename T>
__device__ void load_four(const T* from, int count, bool aligned, Four<T>& to) {
  if (aligned && count >= kVector) {
    to = *reinterpret_cast<const Four<T>*>(from);
    return;
  }
#pragma unroll
  for (int k = 0; k < kVector; ++k)
    if (k < count) to.values[k] = from[k];
}

/// Writes the first `count` elements, four at most.
template <typename T>
__device__ void store_four(const Four<T>& four, T* to, int count, bool aligned) {
  if (aligned && count >= kVector) {
    *reinterpret_cast<Four<T>*>(to) = four;
    return;
  }
#pragma unroll
  for (int k = 0; k < kVector; ++k)
    if (k < count) to[k] = four.values[k];
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
};

/// The part of a tensor that is one chunk.
struct TensorChunk {
  void* data;
  Format format;
  bool aligned;  // for loads and stores of vectors

  __device__ TensorChunk(void* tensor, std::uint32_t type, std::int64_t start)
      : data(static_cast<char*>(tensor) + start * size_of(static_cast<Format>(type))),
        format(static_cast<Format>(type)),
        aligned(reinterpret_cast<std::uintptr_t>(data) %
                    static_cast<std::uintptr_t>(kVector * size_of(format)) ==
                0) {}

  /// Reads the first `count` elements. Nothing is computed with them here, so that the reads of
  /// other tensors need not wait.
  __device__ void load(int i, int count, Raw& raw) const {
    visit_format(format, [&](auto tag) {
      load_four(static_cast<const decltype(tag)*>(data) + i, count, aligned, raw.of(tag));
    });
  }

  __device__ void widen(Raw& raw, float* values) const {
    visit_format(format, [&](auto tag) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) values[k] = to_float(raw.of(tag).values[k]);
    });
  }

  __device__ void store(const float* values, int i, int count) const {
    visit_format(format, [&](auto tag) {
      using T = decltype(tag);
      Four<T> found;
#pragma unroll
      for (int k = 0; k < kVector; ++k) from_float(values[k], &found.values[k]);
      store_four(found, static_cast<T*>(data) + i, count, aligned);
    });
  }
};

}  // namespace fastamp
