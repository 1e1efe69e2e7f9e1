// How a warp reduces a strip: in the order of step/math.h, with aligned vectors wherever the strip
// begins; or in pairs of float32, in the order that is fastest.
#pragma once

#include <cstdint>

#include "step/convert.cuh"
#include "step/math.h"

namespace fastamp {

constexpr int kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffffU;
constexpr int kVectorBytes = 16;  // of one load or store
constexpr int kUnroll = 8;        // loads in flight per thread

template <typename T>
struct alignas(kVectorBytes) Vector {
  static constexpr int kSize = kVectorBytes / static_cast<int>(sizeof(T));
  T values[kSize];
};

/// Returns the number of elements before the first aligned vector.
template <typename T>
__device__ int count_head(const T* data, int numel) {
  constexpr int kSize = Vector<T>::kSize;
  const auto past = reinterpret_cast<std::uintptr_t>(data) % kVectorBytes / sizeof(T);
  const int head = (kSize - static_cast<int>(past)) % kSize;
  return head < numel ? head : numel;
}

/// Calls add(i, x) for the part of a strip that is this thread's, with kRows loads in flight; x is
/// the i-th of its vector. Vectors begin `head` elements into the strip; the elements before them
/// are the last thread's.
template <int kRows, typename T, typename Add>
FASTAMP_INLINE __device__ void visit_strip(const T* data, int numel, int head, const Add& add) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kLanes = kWarp * kSize;
  const int thread = static_cast<int>(threadIdx.x) % kWarp;
  if (thread == kWarp - 1)
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      if (i >= kSize - head) add(i, to_float(data[i - (kSize - head)]));
  const int first = thread * kSize;
  int start = head;
#pragma unroll kRows
  for (; start + kLanes <= numel; start += kLanes) {
    const auto row = *reinterpret_cast<const Vector<T>*>(data + start + first);
#pragma unroll
    for (int i = 0; i < kSize; ++i) add(i, to_float(row.values[i]));
  }
  if (start < numel)
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      if (start + first + i < numel) add(i, to_float(data[start + first + i]));
}

/// Rotates the lanes of a warp, kSize in each thread, up by `count` < kSize.
template <int kSize>
__device__ void rotate(double* lanes, int count) {
  const int before = static_cast<int>(threadIdx.x + kWarp - 1) % kWarp;
#pragma unroll
  for (int step = kSize / 2; step > 0; step /= 2) {
    if ((count & step) == 0) continue;
    double moved[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      moved[i] =
          i < step ? __shfl_sync(kWholeWarp, lanes[kSize - step + i], before) : lanes[i - step];
#pragma unroll
    for (int i = 0; i < kSize; ++i) lanes[i] = moved[i];
  }
}

/// Reduces one strip with one warp. Where vectors begin `head` elements into the strip, thread t
/// adds to the lanes from t * kSize + head on; then the lanes are rotated, and it holds those from
/// t * kSize to (t + 1) * kSize - 1. The result is thread 0's. This function and the next are not
/// inlined, so that they are compiled once for all kernels: a call costs nothing beside a strip.
template <int kRows, typename T>
__device__ __attribute__((noinline)) double reduce_in_order(const T* data, int numel) {
  constexpr int kSize = Vector<T>::kSize;
  const int head = count_head(data, numel);
  double lanes[kSize] = {};
  visit_strip<kRows>(data, numel, head, [&](int lane, float x) { lanes[lane] += square(x); });
  rotate<kSize>(lanes, head);
#pragma unroll 1  // once a strip
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
#pragma unroll
    for (int i = 0; i < kSize; ++i) lanes[i] += __shfl_down_sync(kWholeWarp, lanes[i], offset);
  return join_lanes<kSize>(lanes);
}

/// Reduces one strip with one warp in pairs of float32; where they are not accurate, as above.
template <typename T>
__device__ __attribute__((noinline)) double reduce_in_pairs(const T* data, int numel) {
  constexpr int kSize = Vector<T>::kSize;
  Pair lanes[kSize] = {};
  float largest = 0;
  visit_strip<kUnroll>(data, numel, count_head(data, numel), [&](int lane, float x) {
    lanes[lane] = lanes[lane] + Pair::square(x);
    largest = fmaxf(largest, fabsf(x));
  });
  Pair sum = join_lanes<kSize>(lanes);
#pragma unroll 1  // once a strip
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sum = sum + Pair{__shfl_down_sync(kWholeWarp, sum.high, offset),
                     __shfl_down_sync(kWholeWarp, sum.low, offset)};
    largest = fmaxf(largest, __shfl_down_sync(kWholeWarp, largest, offset));
  }
  const int accurate = is_accurate(sum, largest) ? 1 : 0;
  if (__shfl_sync(kWholeWarp, accurate, 0) == 0) return reduce_in_order<1>(data, numel);
  return static_cast<double>(sum.high) + static_cast<double>(sum.low);
}

}  // namespace fastamp
