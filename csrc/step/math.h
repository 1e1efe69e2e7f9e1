// The arithmetic of every backend, compiled by the host and by the device compiler, and the order
// in which it adds. Nothing here is a*b+c in a format where the product would round, so it does not
// matter whether a compiler contracts it.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "step/types.h"
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

// Sums without float64, for GPUs with few float64 units.

/// The sum of two float32 numbers, `low` small beside `high`.
struct Pair {
  float high;
  float low;

  /// Knuth's TwoSum loses nothing of `high`; `low` takes up the errors, and rounds: Ogita, Rump and
  /// Oishi, "Accurate sum and dot product" (2005), algorithm 5.3.
  FASTAMP_HD friend Pair operator+(Pair a, Pair b) {
    const float sum = a.high + b.high;
    const float part = sum - a.high;
    const float error = (a.high - (sum - part)) + (b.high - part);
    return {sum, a.low + (error + b.low)};
  }

  /// Returns x * x by Dekker's TwoProduct (1971), whose error is one fma: exact from 2^-102, so
  /// that the error is a multiple of the smallest number, to 2^127; off by 2^-150 at most below.
  FASTAMP_HD static Pair square(float x) {
    const float high = product(x, x);
    return {high, fmaf(x, x, -high)};
  }
};

/// Joins lanes, float64 or pairs: halves them until one is left.
template <int kCount, typename Sum>
FASTAMP_HD FASTAMP_INLINE Sum join_lanes(Sum* lanes) {
  for (int half = kCount / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
  return lanes[0];
}

/// The square of an element, exact in float64 for float32 and below.
FASTAMP_HD FASTAMP_INLINE double square(double x) { return x * x; }

FASTAMP_HD inline float norm_of(double reduced, float inv_scale) {
  return static_cast<float>(sqrt(reduced) * static_cast<double>(inv_scale));
}

FASTAMP_HD inline float scale_of(const ClipSpec& clip) {
  return clip.scale == nullptr ? 1.0F : *clip.scale;
}

FASTAMP_HD inline float inverse(float scale) {
  return static_cast<float>(1.0 / static_cast<double>(scale));
}

/// Turns a sum of squares into what a training step needs. Every formula stands here once.
FASTAMP_HD inline GradStats finish(double reduced, const ClipSpec& clip) {
  // Finite fp32 values cannot overflow a float64 sum: it is finite exactly when all of them are.
  const bool finite = reduced - reduced == 0;
  const float scale = scale_of(clip);
  const float inv_scale = inverse(scale);
  GradStats stats;
  stats.norm = norm_of(reduced, inv_scale);
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

/// Says whether the pairs of a strip add up to its sum, within kPairsError. A sum that is NaN,
/// infinite or nearly so is not below 2^127; `largest` is the largest magnitude that is not NaN.
constexpr float kSmallestSum = 0x1p-96F;
FASTAMP_HD inline bool is_accurate(Pair sum, float largest) {
  return sum.high < 0x1p127F && (sum.high >= kSmallestSum || largest == 0);
}

// How far a reduction that adds strips in pairs is from one that adds in float64 all the way.
// Let u = 2^-24 and S be the sum of the elements that have met in a pair. A square, and each join,
// hands an error of at most u S to `low`; so after k joins one after the other `low` has taken up
// at most (k + 1) u S. What a join adds to `low` rounds twice: by u (k + 1) u S, and by 2 u u S
// where one element joins, else by u (k + 1) u S again.
//   Up to 64 elements join in a lane:          64 * 67 / 2 + 2 * 64 = 2272 u u S
//   Up to 3 joins of lanes, 5 of threads:      below 2 * 8 * 73     = 1168 u u S
//   8192 squares, each off by 2^-150 at most,
//   beside kSmallestSum = 2^-96:                 2^-41                =  128 u u S
// Together a strip is off by less than 4096 u u = 2^-36. The float64 joins of either way are fewer
// than 2^15 for an element (of 2^24 chunks, say), each off by 2^-53: less than 2^-38. Then
// 2^-36 + 2 * 2^-38 is well below the bound.
constexpr double kPairsError = 0x1p-35;

/// Says whether a reduction in pairs gives the norm that float64 gives: if both ends of the error
/// bound give one norm, since every step to the norm is monotone. What is not finite comes from
/// float64.
FASTAMP_HD inline bool is_certain(double reduced, const ClipSpec& clip) {
  const float inv_scale = inverse(scale_of(clip));
  return !(reduced - reduced == 0) || norm_of(reduced * (1 - kPairsError), inv_scale) ==
                                          norm_of(reduced * (1 + kPairsError), inv_scale);
}

}  // namespace fastamp
