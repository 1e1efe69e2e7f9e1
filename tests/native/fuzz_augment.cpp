// Crops, flips and holes in images of any shape.
#include <cstdint>
#include <cstring>
#include <vector>

#include "data/augment.h"
#include "input.h"

namespace fuzz {

namespace {

/// Whether a step clears pixel (y, x) of the result, which is walked back to the image.
bool is_cleared(const fastamp::Images& images, std::uint64_t key, int64_t& y, int64_t& x) {
  for (int s = images.num_steps; s-- > 0;) {
    const fastamp::AugmentStep& step = images.steps[s];
    int64_t height = images.height;
    int64_t width = images.width;
    for (int before = 0; before < s; ++before)
      if (images.steps[before].kind == fastamp::StepKind::kCrop) {
        height = images.steps[before].height;
        width = images.steps[before].width;
      }
    if (step.kind == fastamp::StepKind::kFlip) {
      if (fastamp::draw(key, 2 * s + 1) < step.y_bound) x = width - 1 - x;
      continue;
    }
    const int64_t top = fastamp::draw_below(key, 2 * s + 1, step.y_bound) - step.top;
    const int64_t left = fastamp::draw_below(key, 2 * s + 2, step.x_bound) - step.left;
    if (step.kind == fastamp::StepKind::kCutout) {
      if (y >= top && y < top + step.height && x >= left && x < left + step.width) return true;
      continue;
    }
    y += top;
    x += left;
    if (y < 0 || y >= height || x < 0 || x >= width) return true;
  }
  return false;
}

}  // namespace

void fuzz_augment(Input& input) {
  fastamp::Images images{
      1 + input.number(4), 1 + input.number(40), 1 + input.number(80), 1 + input.number(15), 1, {}};
  images.num_steps += static_cast<int>(input.number(fastamp::kMaxSteps - 1));
  int64_t height = images.height;
  int64_t width = images.width;
  for (int s = 0; s < images.num_steps; ++s) {
    fastamp::AugmentStep& step = images.steps[s];
    step.kind = static_cast<fastamp::StepKind>(input.take<std::uint8_t>() % 3);
    step.y_bound = std::int64_t{input.take<std::uint8_t>()} << 24;
    if (step.kind == fastamp::StepKind::kFlip) continue;
    step = {step.kind, height, width, input.number(50), input.number(50), 1, 1};
    if (step.kind == fastamp::StepKind::kCutout) {
      step.height += input.number(90);
      step.width += input.number(90);
      continue;
    }
    const int64_t padded_height = height + step.top + input.number(20);
    const int64_t padded_width = width + step.left + input.number(20);
    height = step.height += input.number(padded_height - 1);
    width = step.width += input.number(padded_width - 1);
    step.y_bound = padded_height - height + 1;
    step.x_bound = padded_width - width + 1;
  }
  const int64_t size = images.pixel_nbytes;
  const int64_t plane_nbytes = images.height * images.width * size;
  Bytes source = allocate(images.planes * plane_nbytes);
  input.fill(source, images.planes * plane_nbytes);
  const auto key = input.take<std::uint64_t>();
  require(fastamp::result_nbytes(images) == images.planes * height * width * size,
          "a result's size");
  const Bytes output = allocate(images.planes * height * width * size);
  fastamp::augment(images, key, source.get(), output.get());
  const char zeros[16]{};
  for (int64_t i = 0; i < images.planes * height * width; ++i) {
    const int64_t plane = i / (height * width);
    int64_t y = i / width % height;
    int64_t x = i % width;
    const bool is_zero = is_cleared(images, key, y, x);
    const char* expected =
        is_zero ? zeros : source.get() + plane * plane_nbytes + (y * images.width + x) * size;
    require(std::memcmp(output.get() + i * size, expected, as_size(size)) == 0,
            "an augmented pixel");
  }
}

}  // namespace fuzz
