// Images that are augmented while they are copied: a sample's key draws where it is cropped,
// whether it is flipped and where it is cut out.
#pragma once

#include <cstdint>

namespace fastamp {

constexpr int kMaxSteps = 8;

enum class StepKind : std::int32_t { kCrop, kFlip, kCutout };

/// One augmentation. Each draws two numbers, `y` and `x`, below its bounds.
struct AugmentStep {
  StepKind kind;
  std::int64_t y_bound;  ///< of a flip: its probability, times 2^32
  std::int64_t x_bound;
  std::int64_t top;     ///< padding of a crop, or rows of a hole above its center: the upper
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
};

/// Random number `n` of a sample, of 32 bits.
std::int64_t draw(std::uint64_t key, int n);

/// The same below `bound`, which is less than 2^31.
std::int64_t draw_below(std::uint64_t key, int n, std::int64_t bound);

/// Bytes of an augmented image.
std::int64_t result_nbytes(const Images& images);

/// Writes the augmented image of the sample with this key.
void augment(const Images& images, std::uint64_t key, const char* source, char* output);

}  // namespace fastamp
