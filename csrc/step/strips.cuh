// How a warp reduces a strip: in the order of step/math.h, with aligned vectors wherever the strip
// begins.
#pragma once

#include <cstdint>

#include "step/math.h"
#include "step/vectors.cuh"

namespace fastamp {

constexpr int kVectorBytes = 16;  // of one load or store
constexpr int kRows = 8;          // vectors that a thread loads before it adds the first

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
/// adds to the lanes from t * kSize + head on, and the last thread has the elements before them.
/// Then the lanes are rotated, so that thread t has those from t * kSize on. The result is thread
/// 0's. It is not inlined, so that it is compiled once for all kernels: a call costs nothing beside
/// a strip.
template <typename T>
__device__ __attribute__((noinline)) double reduce_strip(const T* data, int numel) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kLanes = kWarp * kSize;
  const int head = count_head(data, numel);
  const int thread = static_cast<int>(threadIdx.x) % kWarp;
  double lanes[kSize] = {};
  const auto add = [&](int lane, T x) { lanes[lane] += square(to_float(x)); };
  if (thread == kWarp - 1)
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      if (i >= kSize - head) add(i, data[i - (kSize - head)]);
  const T* from = data + head + thread * kSize;
  int left = numel - head;
  const auto add_rows = [&](auto has_row) FASTAMP_INLINE_LAMBDA {
    Vector<T> rows[kRows] = {};  // where there is no row, zeros, which change no sum
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (has_row(r)) rows[r] = *reinterpret_cast<const Vector<T>*>(from + r * kLanes);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kSize; ++i) add(i, rows[r].values[i]);
    from += kRows * kLanes;
    left -= kRows * kLanes;
  };
  while (left >= kRows * kLanes) add_rows([](int) { return true; });
  if (left >= kLanes) add_rows([&](int r) { return left >= (r + 1) * kLanes; });
  const int rest = (numel - head) % kLanes;
  from = data + numel - rest + thread * kSize;
#pragma unroll
  for (int i = 0; i < kSize; ++i)
    if (thread * kSize + i < rest) add(i, from[i]);
  rotate<kSize>(lanes, head);
#pragma unroll 1  // once a strip
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
#pragma unroll
    for (int i = 0; i < kSize; ++i) lanes[i] += __shfl_down_sync(kWholeWarp, lanes[i], offset);
  return join_lanes<kSize>(lanes);
}

}  // namespace fastamp
