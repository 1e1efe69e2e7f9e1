// All augmentations of an image become one map from the result's pixels to the image's, and
// rectangles of zeros over it. The pass goes plane by plane, so that pixels to clear are still in
// the cache.
#include "data/augment.h"

#include <cstddef>
#include <cstring>

#include "support/macros.h"

namespace fastamp {
namespace {

/// Rows and columns from the upper left corner to before the lower right one.
struct Rect {
  std::int64_t top;
  std::int64_t left;
  std::int64_t bottom;
  std::int64_t right;
};

/// Pixel (y, x) of the result is (top + y, left + x) of the image, or (top + y, left - x) where it
/// is flipped, if it lies in `valid` and in no hole; all others are 0.
struct Placement {
  std::int64_t height;
  std::int64_t width;
  std::int64_t top;
  std::int64_t left;
  bool flipped;
  Rect valid;
  int num_holes;
  Rect holes[kMaxSteps];
};

/// One step of splitmix64: a permutation of the 64-bit numbers that looks random.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

std::int64_t clamp(std::int64_t value, std::int64_t most) {
  return value < 0 ? 0 : value < most ? value : most;
}

void clip(Rect& rect, std::int64_t height, std::int64_t width) {
  rect = {clamp(rect.top, height), clamp(rect.left, width), clamp(rect.bottom, height),
          clamp(rect.right, width)};
}

template <typename Change>
void change_rects(Placement& placed, const Change& change) {
  change(placed.valid);
  for (int h = 0; h < placed.num_holes; ++h) change(placed.holes[h]);
}

/// Draws the augmentations of a sample's image.
Placement place(const Images& images, std::uint64_t key) {
  Placement placed{
      images.height, images.width, 0, 0, false, {0, 0, images.height, images.width}, 0, {}};
  for (int s = 0; s < images.num_steps; ++s) {
    const AugmentStep& step = images.steps[s];
    if (step.kind == StepKind::kFlip) {
      if (draw(key, 2 * s + 1) >= step.y_bound) continue;
      placed.left += placed.flipped ? 1 - placed.width : placed.width - 1;
      placed.flipped = !placed.flipped;
      change_rects(placed, [&placed](Rect& rect) {
        rect = {rect.top, placed.width - rect.right, rect.bottom, placed.width - rect.left};
      });
      continue;
    }
    const std::int64_t y = draw_below(key, 2 * s + 1, step.y_bound) - step.top;
    const std::int64_t x = draw_below(key, 2 * s + 2, step.x_bound) - step.left;
    if (step.kind == StepKind::kCutout) {
      placed.holes[placed.num_holes++] = {y, x, y + step.height, x + step.width};
      continue;
    }
    placed.top += y;
    placed.left += placed.flipped ? -x : x;
    change_rects(placed, [y, x](Rect& rect) {
      rect = {rect.top - y, rect.left - x, rect.bottom - y, rect.right - x};
    });
    placed.height = step.height;
    placed.width = step.width;
    clip(placed.valid, placed.height, placed.width);
  }
  for (int h = 0; h < placed.num_holes; ++h) clip(placed.holes[h], placed.height, placed.width);
  return placed;
}

constexpr std::uint64_t kOddBytes = 0xFF00FF00FF00FF00;

/// Pixels of 1, 2 or 4 bytes, as many at a time as 8 bytes have; of any size if kSize is 0, one at
/// a time.
template <int kSize>
struct Pixels {
  static constexpr std::int64_t kBlock = kSize == 0 ? 1 : 8 / kSize;

  explicit Pixels(std::int64_t size_) : any_size(size_) {}

  std::size_t nbytes(std::int64_t count) const {
    return static_cast<std::size_t>(count * (kSize == 0 ? any_size : kSize));
  }

  /// Copies a block, its last pixel first.
  FASTAMP_INLINE void copy_reversed(const char* from, char* to) const {
    if (kBlock == 1) {
      std::memcpy(to, from, nbytes(1));
      return;
    }
    std::uint64_t block;
    std::memcpy(&block, from, sizeof block);
    block = kSize == 4 ? block >> 32 | block << 32 : __builtin_bswap64(block);
    if (kSize == 2) block = (block & kOddBytes) >> 8 | (block & ~kOddBytes) << 8;
    std::memcpy(to, &block, sizeof block);
  }

  std::int64_t any_size;
};

/// A plane of the image and of the result.
template <int kSize>
struct Plane {
  static constexpr std::int64_t kBlock = Pixels<kSize>::kBlock;
  Pixels<kSize> pixels;
  const Images& images;
  const Placement& placed;
  const char* source;
  char* output;

  FASTAMP_INLINE char* at(std::int64_t y, std::int64_t x) const {
    return output + pixels.nbytes(y * placed.width + x);
  }

  /// Copies the valid pixels, and perhaps others, which will be cleared.
  FASTAMP_INLINE void copy() const {
    const auto& [top, left, bottom, right] = placed.valid;
    const std::int64_t count = right - left;
    if (bottom == top || count == 0) return;
    const std::int64_t first = placed.flipped ? placed.left - right + 1 : placed.left + left;
    const char* row = source + pixels.nbytes((placed.top + top) * images.width + first);
    if (!placed.flipped && placed.width == images.width) {
      std::memcpy(at(top, left), row, pixels.nbytes((bottom - top - 1) * placed.width + count));
      return;
    }
    for (std::int64_t y = top; y < bottom; ++y, row += pixels.nbytes(images.width)) {
      if (placed.flipped) {
        reverse(row, count, at(y, left));
      } else {
        std::memcpy(at(y, left), row, pixels.nbytes(count));
      }
    }
  }

  FASTAMP_INLINE void reverse(const char* row, std::int64_t count, char* to) const {
    const char* end = row + pixels.nbytes(count);
    std::int64_t i = 0;
    for (; i + kBlock <= count; i += kBlock)
      pixels.copy_reversed(end - pixels.nbytes(i + kBlock), to + pixels.nbytes(i));
    if (i < count && count >= kBlock)  // the last block overlaps the one before it
      pixels.copy_reversed(row, to + pixels.nbytes(count - kBlock));
    for (; i < count && count < kBlock; ++i)
      std::memcpy(to + pixels.nbytes(i), end - pixels.nbytes(i + 1), pixels.nbytes(1));
  }

  void clear(const Rect& rect) const {
    if (rect.left == rect.right) return;
    for (std::int64_t y = rect.top; y < rect.bottom; ++y)
      std::memset(at(y, rect.left), 0, pixels.nbytes(rect.right - rect.left));
  }

  /// Clears what lies outside of the image.
  void clear_borders() const {
    const auto& [top, left, bottom, right] = placed.valid;
    clear({0, 0, top, placed.width});
    clear({top, 0, bottom, left});
    clear({top, right, bottom, placed.width});
    clear({bottom, 0, placed.height, placed.width});
  }
};

template <int kSize>
void augment_planes(const Images& images, const Placement& placed, const char* source,
                    char* output) {
  const Pixels<kSize> pixels(images.pixel_nbytes);
  for (std::int64_t p = 0; p < images.planes; ++p) {
    const Plane<kSize> plane{pixels, images, placed, source, output};
    plane.copy();
    plane.clear_borders();
    for (int h = 0; h < placed.num_holes; ++h) plane.clear(placed.holes[h]);
    source += pixels.nbytes(images.height * images.width);
    output += pixels.nbytes(placed.height * placed.width);
  }
}

}  // namespace

std::int64_t draw(std::uint64_t key, int n) {
  return static_cast<std::int64_t>(mix(key + static_cast<std::uint64_t>(n)) >> 32);
}

std::int64_t draw_below(std::uint64_t key, int n, std::int64_t bound) {
  return (draw(key, n) * bound) >> 32;
}

std::int64_t result_nbytes(const Images& images) {
  const Placement any = place(images, 0);
  return images.planes * any.height * any.width * images.pixel_nbytes;
}

void augment(const Images& images, std::uint64_t key, const char* source, char* output) {
  const Placement placed = place(images, key);
  switch (images.pixel_nbytes) {
    case 1:
      return augment_planes<1>(images, placed, source, output);
    case 2:
      return augment_planes<2>(images, placed, source, output);
    case 4:
      return augment_planes<4>(images, placed, source, output);
    default:
      return augment_planes<0>(images, placed, source, output);
  }
}

}  // namespace fastamp
