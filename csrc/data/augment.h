// How images are augmented, for host and device: a sample's key draws where it is cropped, whether
// it is flipped and where it is cut out. All of it becomes one map from the result's pixels to the
// image's, and what is painted over it.
#pragma once

#include <cstdint>

#include "support/macros.h"

namespace fastamp {

constexpr int kMaxSteps = 8;

enum class StepKind : std::int32_t { kCrop, kFlip, kCutout };

/// One augmentation. Each draws two numbers, `y` and `x`, below its bounds.
struct AugmentStep {
  StepKind kind;
  std::int64_t y_bound;  ///< of a flip: its probability, times 2^32
  std::int64_t x_bound;
  std::int64_t top;     ///< padding of a crop, or what lies above the centre of a hole: its upper
  std::int64_t left;    ///<   left corner lies at (y - top, x - left)
  std::int64_t height;  ///< of the crop or the hole
  std::int64_t width;
};

/// Rows of a column that are images; without steps they are copied as they are. The pixels of a
/// plane lie side by side.
struct Images {
  std::int64_t planes;
  std::int64_t height;
  std::int64_t width;
  std::int64_t pixel_nbytes;
  int num_steps;
  AugmentStep steps[kMaxSteps];
  const char* fills;  ///< a pixel for each step and plane
};

/// Rows and columns from the upper left corner to before the lower right one.
struct Rect {
  std::int64_t top;
  std::int64_t left;
  std::int64_t bottom;
  std::int64_t right;
};

/// Fills the inside of a rectangle, or all of the image outside of it.
struct Paint {
  Rect rect;
  bool outside;
  int step;
};

/// Pixel (y, x) of the result is (top + y, left + x) of the image, or (top + y, left - x) where it
/// is flipped, if it lies in `valid`; and then what the paints make of it, one after the other.
struct Placement {
  std::int64_t height;
  std::int64_t width;
  std::int64_t top;
  std::int64_t left;
  bool flipped;
  Rect valid;
  int num_paints;
  Paint paints[kMaxSteps];
};

/// One step of splitmix64: a permutation of the 64-bit numbers that looks random.
FASTAMP_HD inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

/// Draw `n` of a sample, 32 bits of it.
FASTAMP_HD inline std::int64_t draw(std::uint64_t key, int n) {
  return static_cast<std::int64_t>(mix(key + static_cast<std::uint64_t>(n)) >> 32);
}

/// The same below `bound`, which is less than 2^31.
FASTAMP_HD inline std::int64_t draw_below(std::uint64_t key, int n, std::int64_t bound) {
  return (draw(key, n) * bound) >> 32;
}

FASTAMP_HD inline std::int64_t clamp(std::int64_t value, std::int64_t most) {
  return value < 0 ? 0 : value < most ? value : most;
}

FASTAMP_HD inline void clip(Rect& rect, std::int64_t height, std::int64_t width) {
  rect = {clamp(rect.top, height), clamp(rect.left, width), clamp(rect.bottom, height),
          clamp(rect.right, width)};
}

/// Lets the result begin at (y, x) of what it was.
FASTAMP_HD inline void shift(Placement& placed, std::int64_t y, std::int64_t x) {
  placed.top += y;
  placed.left += placed.flipped ? -x : x;
  for (int p = 0; p < placed.num_paints; ++p) {
    Rect& rect = placed.paints[p].rect;
    rect = {rect.top - y, rect.left - x, rect.bottom - y, rect.right - x};
  }
}

FASTAMP_HD inline void flip(Placement& placed) {
  placed.left += placed.flipped ? 1 - placed.width : placed.width - 1;
  placed.flipped = !placed.flipped;
  for (int p = 0; p < placed.num_paints; ++p) {
    Rect& rect = placed.paints[p].rect;
    rect = {rect.top, placed.width - rect.right, rect.bottom, placed.width - rect.left};
  }
}

/// Draws what becomes of the image of a sample.
FASTAMP_HD inline Placement place(const Images& images, std::uint64_t key) {
  Placement placed;
  placed.height = images.height;
  placed.width = images.width;
  placed.top = placed.left = 0;
  placed.flipped = false;
  placed.num_paints = 0;
  for (int s = 0; s < images.num_steps; ++s) {
    const AugmentStep& step = images.steps[s];
    if (step.kind == StepKind::kFlip) {
      if (draw(key, 2 * s + 1) < step.y_bound) flip(placed);
      continue;
    }
    const std::int64_t y = draw_below(key, 2 * s + 1, step.y_bound) - step.top;
    const std::int64_t x = draw_below(key, 2 * s + 2, step.x_bound) - step.left;
    Paint& paint = placed.paints[placed.num_paints];
    paint.step = s;
    paint.outside = step.kind == StepKind::kCrop;
    if (step.kind == StepKind::kCutout) {
      paint.rect = {y, x, y + step.height, x + step.width};
    } else {
      shift(placed, y, x);
      paint.rect = {-y, -x, placed.height - y, placed.width - x};
      placed.height = step.height;
      placed.width = step.width;
    }
    ++placed.num_paints;
  }
  const std::int64_t begin = placed.flipped ? placed.left + 1 - images.width : -placed.left;
  placed.valid = {-placed.top, begin, images.height - placed.top, begin + images.width};
  clip(placed.valid, placed.height, placed.width);
  for (int p = 0; p < placed.num_paints; ++p)
    clip(placed.paints[p].rect, placed.height, placed.width);
  return placed;
}

/// Bytes of an augmented image.
FASTAMP_HD inline std::int64_t result_nbytes(const Images& images) {
  const Placement any = place(images, 0);
  return images.planes * any.height * any.width * images.pixel_nbytes;
}

/// Writes the augmented image of the sample with this key.
void augment(const Images& images, std::uint64_t key, const char* source, char* output);

}  // namespace fastamp
