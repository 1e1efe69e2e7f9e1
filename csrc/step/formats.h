// How lean optimizers keep float32 values in fewer bits: weights in 16, or in 16 and 16 more,
// states in 16 or 8. Integer arithmetic, products and sums of float32, for host and device, so that
// all backends get the same bits.
#pragma once

#include <cstdint>

#include "step/convert.h"
#include "step/math.h"
#include "step/ops.h"
#include "support/macros.h"

namespace fastamp {

constexpr std::uint32_t kInfinity = 0x7f800000U;

FASTAMP_HD FASTAMP_INLINE std::uint32_t magnitude_of(float x) { return bits_of(x) & 0x7fffffffU; }

/// The bits of a value; those of all NaN are the same.
FASTAMP_HD FASTAMP_INLINE std::uint32_t canonical(float x) {
  return magnitude_of(x) > kInfinity ? 0x7fc00000U : bits_of(x);
}

/// The nearest bfloat16 of a float32, ties away from zero, and the rest of its bits.
struct Halves {
  std::uint16_t high;
  std::int16_t low;
};

FASTAMP_HD FASTAMP_INLINE Halves split(float x) {
  const std::uint32_t bits = canonical(x);
  return {static_cast<std::uint16_t>((bits + 0x8000U) >> 16),
          static_cast<std::int16_t>(bits & 0xffffU)};
}

/// Returns the float32. No zero has a negative rest: it belongs to the weight that was there before
/// somebody set it to zero, and would make it NaN.
FASTAMP_HD FASTAMP_INLINE float join(Halves halves) {
  const bool is_others = (halves.high & 0x7fffU) == 0 && halves.low < 0;
  const auto low =
      static_cast<std::uint32_t>(is_others ? 0 : static_cast<std::int32_t>(halves.low));
  return float_of((static_cast<std::uint32_t>(halves.high) << 16) + low);
}

/// Returns 32 random bits from a number and a key: the last steps of MurmurHash3.
FASTAMP_HD FASTAMP_INLINE std::uint32_t mix(std::uint32_t bits, std::uint32_t key) {
  bits ^= key;
  bits = (bits ^ (bits >> 16)) * 0x85ebca6bU;
  bits = (bits ^ (bits >> 13)) * 0xc2b2ae35U;
  return bits ^ (bits >> 16);
}

/// Returns the key of a step: of an optimizer's seed and the count of steps.
FASTAMP_HD inline std::uint32_t key_of(std::uint32_t seed, float step) {
  return mix(static_cast<std::uint32_t>(step), mix(seed, 0x9e3779b9U));
}

/// The random bits of one element, of its first state and its weight after the update and its place
/// in its row: the same on every rank, however rows are sharded.
FASTAMP_HD FASTAMP_INLINE std::uint32_t noise_of(float state, float param, std::uint32_t place,
                                                 std::uint32_t key) {
  return mix(bits_of(state) ^ (bits_of(param) * 0x9e3779b1U + place), key);
}

/// Rounds up with a probability of what is cut off, by the lower 16 bits of `noise`.
FASTAMP_HD FASTAMP_INLINE std::uint16_t round_randomly(float x, std::uint32_t noise) {
  return static_cast<std::uint16_t>((canonical(x) + (noise & 0xffffU)) >> 16);
}

// A block of 8-bit codes has one scale: the largest magnitude, divided by the largest code's value.
// A code stands for (1 + m / 16) * 2^e - 1: as in the mu-law of ITU-T G.711, steps are even near
// zero and in even ratios above. Decoding is a shift and a sum, and so is encoding.
constexpr std::int64_t kBlockSize = 256;
constexpr int kMantissa = 4;
constexpr int kDropped = 23 - kMantissa;       // bits of a float32's mantissa
constexpr std::uint32_t kOne = 127U << 23;     // 1.0F
constexpr float kSmallestLargest = 0x1p-100F;  // blocks below are kept as zeros

/// A sign and 7 bits.
struct SignedCode {
  static constexpr bool kHasSign = true;
  static constexpr float kLeast = 0;
  static constexpr float kTop = 247;
};

/// 8 bits, of a mean of squares. Codes stand for 1/32 more: the update divides by the root, so none
/// is zero.
struct UnsignedCode {
  static constexpr bool kHasSign = false;
  static constexpr float kLeast = 1.0F / 32;
  static constexpr float kTop = 63487 + kLeast;
};

/// Calls fn(Code{}) with the code of a format of 8 bits.
template <typename Fn>
FASTAMP_HD FASTAMP_INLINE auto visit_code(Format format, Fn fn) {
  return format == Format::kSigned8 ? fn(SignedCode{}) : fn(UnsignedCode{});
}

/// Some neighboring elements of a parameter.
struct Block {
  std::int64_t number;  ///< of codes: the place of its scale
  std::int64_t start;   ///< its first element
  int numel;
  std::uint32_t place;  ///< of its first element, counted from the begin of a row
};

/// The blocks of a chunk. Those of codes lie within rows: each row has whole ones, and a shorter
/// one at its end, and the chunk is a range of what would fit into whole ones. Those of floats fill
/// the chunk, in any size.
class Blocks {
 public:
  FASTAMP_HD static std::int64_t in_row(std::int64_t row) {
    return (row + kBlockSize - 1) / kBlockSize;
  }

  FASTAMP_HD Blocks(std::int64_t start, std::int64_t numel, std::uint32_t row, bool has_codes,
                    std::int64_t size_of_floats)
      : size_(has_codes ? kBlockSize : size_of_floats),
        count_(static_cast<std::uint32_t>((numel + size_ - 1) / size_)),
        room_(has_codes ? row : numel),
        start_(start) {
    if (!has_codes) {
      place_ = static_cast<std::uint32_t>(start % row);
      return;
    }
    per_row_ = static_cast<std::uint32_t>(in_row(row));
    number_ = start / kBlockSize;
    start_ = number_ / per_row_ * row;
    first_ = static_cast<std::uint32_t>(number_ % per_row_);
  }

  FASTAMP_HD std::uint32_t count() const { return count_; }

  /// Divides 32 bits only: 64 take a GPU ten times as long.
  FASTAMP_HD FASTAMP_INLINE Block operator[](std::uint32_t i) const {
    const std::uint32_t rows = (first_ + i) / per_row_;
    const std::int64_t at = (first_ + i - rows * per_row_) * size_;
    const std::int64_t numel = size_ < room_ - at ? size_ : room_ - at;
    return {number_ + i, start_ + rows * room_ + at, static_cast<int>(numel),
            place_ + static_cast<std::uint32_t>(at)};
  }

 private:
  std::int64_t size_;
  std::uint32_t count_;
  std::int64_t room_;                 // elements of a row of blocks; of floats the chunk is one row
  std::int64_t start_;                // of the chunk or, of codes, of the row with its first block
  std::int64_t number_ = 0;           // of the first block
  std::uint32_t per_row_ = 1U << 31;  // blocks in a row
  std::uint32_t first_ = 0;           // the first block in its row
  std::uint32_t place_ = 0;           // of the first element of floats in its row
};

/// Returns the elements that chunks divide: with codes as many as whole blocks have room for.
inline std::int64_t room_of(const ParameterView& view) {
  if (!view.has_codes()) return view.numel;
  return view.numel / view.row * Blocks::in_row(view.row) * kBlockSize;
}

/// Of a block, by its largest magnitude: `scale` multiplies values of codes, `inverse` moments.
struct BlockScale {
  float scale;
  float inverse;
};

template <typename Code>
FASTAMP_HD FASTAMP_INLINE BlockScale scale_of_block(std::uint32_t largest) {
  const float most = float_of(largest);
  if (most < kSmallestLargest) return {0, 0};
  if (largest >= kInfinity) return {float_of(kInfinity), 0};
  return {most * (1 / Code::kTop), Code::kTop / most};
}

template <typename Code>
FASTAMP_HD FASTAMP_INLINE float value_of(std::uint32_t code) {
  return float_of((code << kDropped) + kOne) - (1 - Code::kLeast);
}

/// The rounding to the nearest code: half a step.
constexpr std::uint32_t kNearest = 1U << (kDropped - 1);

/// The random rounding by the upper 16 bits of `noise`, kept a little from both ends: a decoded
/// value gets its own code.
FASTAMP_HD FASTAMP_INLINE std::uint32_t rounding_of(std::uint32_t noise) {
  constexpr int kShift = kDropped - 16;
  return ((noise >> 16) << kShift) + (1U << (kShift - 1));
}

template <typename Code>
FASTAMP_HD FASTAMP_INLINE float decode(std::uint8_t code, float scale) {
  if (!Code::kHasSign) return product(value_of<Code>(code), scale);
  const float value = product(value_of<Code>(code & 127U), scale);
  return float_of(bits_of(value) | (static_cast<std::uint32_t>(code & 128U) << 24));
}

/// Returns the code of a value in a block with an inverse scale. The largest value gets the largest
/// code: `rounding` is below one step.
template <typename Code>
FASTAMP_HD FASTAMP_INLINE std::uint8_t encode(float x, float inverse, std::uint32_t rounding) {
  const std::uint32_t sign = Code::kHasSign ? (bits_of(x) >> 24) & 128U : 0;
  const float value = product(Code::kHasSign ? float_of(magnitude_of(x)) : x, inverse);
  float limited = value < Code::kTop ? value : Code::kTop;  // NaN too
  limited = limited > Code::kLeast ? limited : Code::kLeast;
  const std::uint32_t code = (bits_of(limited + (1 - Code::kLeast)) + rounding - kOne) >> kDropped;
  return static_cast<std::uint8_t>(sign | code);
}

}  // namespace fastamp
