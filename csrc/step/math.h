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

FASTAMP_HD constexpr double magnitude(double x) { return x < 0 ? -x : x; }

/// A norm is what each element adds (`term`: x is exact in float64, and so is its square), how two
/// reductions join (NaN stays), and what makes the norm of the whole reduction.
struct L1 {
  FASTAMP_HD static double term(double x) { return magnitude(x); }
  FASTAMP_HD static double join(double a, double b) { return a + b; }
  FASTAMP_HD static double root(double reduced) { return reduced; }
};

struct L2 {
  FASTAMP_HD static double term(double x) { return x * x; }
  FASTAMP_HD static double join(double a, double b) { return a + b; }
  FASTAMP_HD static double root(double reduced) { return sqrt(reduced); }
};

struct Inf {
  FASTAMP_HD static double term(double x) { return magnitude(x); }
  FASTAMP_HD static double join(double a, double b) { return (b > a || b != b) ? b : a; }
  FASTAMP_HD static double root(double reduced) { return reduced; }
};

/// The one place that turns a NormType into a type.
template <typename Fn>
FASTAMP_INLINE auto visit_norm(NormType norm_type, Fn fn) {
  switch (norm_type) {
    case NormType::kL1:
      return fn(L1{});
    case NormType::kInf:
      return fn(Inf{});
    case NormType::kL2:
      break;
  }
  return fn(L2{});
}

/// Turns a reduction into what a training step needs. Every formula stands here once.
template <typename Norm>
FASTAMP_HD GradStats finish(double reduced, const ClipSpec& clip) {
  // Finite fp32 values cannot overflow a float64 sum: it is finite exactly when all of them are.
  const bool finite = reduced - reduced == 0;
  const float scale = clip.scale == nullptr ? 1.0F : *clip.scale;
  const float inv_scale = static_cast<float>(1.0 / static_cast<double>(scale));
  GradStats stats;
  stats.norm = static_cast<float>(Norm::root(reduced) * static_cast<double>(inv_scale));
  stats.found_inf = finite ? 0.0F : 1.0F;
  const bool clips = clip.clip && (finite || !clip.only_finite);
  const float coef = clips ? clip.max_norm / (stats.norm + 1e-6F) : 1.0F;
  stats.clip_coef = coef > 1.0F ? 1.0F : coef;  // NaN stays, as in torch.clamp
  stats.factor = stats.clip_coef * inv_scale;
  stats.grad_scale = scale / stats.clip_coef;
  stats.scale = scale;
  if (clip.skipped != nullptr) {
    // Where a kernel divides by an infinite scale every gradient is 0: such a scale has to fall.
    if (stats.clip_coef > 0 && stats.grad_scale > FLT_MAX) stats.found_inf = 1.0F;
    *clip.skipped += stats.found_inf;
  }
  return stats;
}

}  // namespace fastamp
