// The arithmetic of every backend, compiled by the host and by the device compiler, and the order
// in which it adds. Nothing here is a*b+c in a format where the product would round, so it does not
// matter whether a compiler contracts it.
#pragma once

#include <cmath>
#include <cstdint>

#include "step/ops.h"
#include "support/macros.h"

namespace fastamp {

// The order of addition, the same for every thread count and device:
//   a strip of kStrip elements has kRowBytes / sizeof(element) lanes; element i adds to lane
//   i % lanes, in the order of i; the lanes of a strip, then the kStripsPerChunk strips of a
//   chunk, are halved (0 += n/2, 1 += n/2 + 1, ...) until one is left; the chunks of all tensors,
//   in list order, add to kFinalLanes lanes in the same way.
// A row is one 16-byte load for each of the 32 threads of a warp.
constexpr std::int64_t kRowBytes = 32 * 16;
constexpr std::int64_t kStrip = 8192;
constexpr std::int64_t kStripsPerChunk = 8;
constexpr std::int64_t kChunk = kStrip * kStripsPerChunk;
constexpr int kFinalLanes = 1024;

FASTAMP_HD constexpr std::int64_t chunks_of(std::int64_t numel) {
  return (numel + kChunk - 1) / kChunk;
}

/// Joins lanes: halves them until one is left.
template <int kCount>
FASTAMP_HD FASTAMP_INLINE double join_lanes(double* lanes) {
  for (int half = kCount / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

/// The square of an element, exact in float64 for float32 and below.
FASTAMP_HD FASTAMP_INLINE double square(double x) { return x * x; }

/// Turns a sum of squares into what a training step needs. Every formula stands here once.
FASTAMP_HD inline GradStats finish(double reduced, const ClipSpec& clip) {
  // Finite fp32 values cannot overflow a float64 sum: it is finite exactly when all of them are.
  const bool finite = reduced - reduced == 0;
  const float scale = clip.scale == nullptr ? 1.0F : *clip.scale;
  const auto inv_scale = static_cast<float>(1.0 / static_cast<double>(scale));
  GradStats stats;
  stats.norm = static_cast<float>(sqrt(reduced) * static_cast<double>(inv_scale));
  stats.found_inf = finite ? 0.0F : 1.0F;
  const bool clips = clip.clip && (finite || !clip.only_finite);
  const float coef = clips ? clip.max_norm / (stats.norm + 1e-6F) : 1.0F;
  stats.clip_coef = coef > 1.0F ? 1.0F : coef;  // NaN stays, as in torch.clamp
  stats.factor = stats.clip_coef * inv_scale;
  stats.scale = scale;
  if (clip.before != nullptr && *clip.before != 0) stats.found_inf = 1.0F;
  if (clip.skipped != nullptr) *clip.skipped += stats.found_inf;
  return stats;
}

}  // namespace fastamp
