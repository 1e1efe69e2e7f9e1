// How fastamp.AdamW keeps float32 values in fewer bits: weights in 16, or in 16 and 16 more,
// moments in 16 or 8. Integer arithmetic, products and sums of float32, for host and device, so
// that all backends get the same bits.
#pragma once

#include <cstdint>

#include "step/convert.h"
#include "step/math.h"
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

/// The random bits of one element. The first moment is different in nearly all elements and steps,
/// and the same on every rank, however the parameter is sharded.
FASTAMP_HD FASTAMP_INLINE std::uint32_t noise_of(float exp_avg, std::uint32_t key) {
  return mix(bits_of(exp_avg), key);
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

/// The first moment's: a sign and 7 bits, to the nearest.
struct SignedCode {
  static constexpr float kLeast = 0;
  static constexpr float kTop = 247;
};

/// The second moment's: 8 bits. A step changes it by a thousandth, and codes are 3 to 6 % apart: it
/// is rounded randomly, or it would never change. Codes stand for 1/32 more: the update divides by
/// the root, so none is zero.
struct UnsignedCode {
  static constexpr float kLeast = 1.0F / 32;
  static constexpr float kTop = 63487 + kLeast;
};

/// The blocks of a tensor: each row has whole ones, and a shorter one at its end.
struct Blocks {
  std::int64_t row;
  std::int64_t per_row;

  FASTAMP_HD explicit Blocks(std::int64_t row_numel)
      : row(row_numel), per_row((row_numel + kBlockSize - 1) / kBlockSize) {}

  FASTAMP_HD std::int64_t count(std::int64_t numel) const {
    return numel > 0 ? numel / row * per_row : 0;
  }
  FASTAMP_HD std::int64_t start(std::int64_t block) const {
    return block / per_row * row + block % per_row * kBlockSize;
  }
  FASTAMP_HD int numel(std::int64_t block) const {
    const std::int64_t rest = row - block % per_row * kBlockSize;
    return static_cast<int>(rest < kBlockSize ? rest : kBlockSize);
  }
};
constexpr std::int64_t kBlocksPerChunk = kChunk / kBlockSize;

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

/// Returns the code of a magnitude that was multiplied by the inverse scale. `rounding` is half a
/// step, or random and below one: the largest value gets the largest code.
template <typename Code>
FASTAMP_HD FASTAMP_INLINE std::uint32_t code_of(float value, std::uint32_t rounding) {
  float limited = value < Code::kTop ? value : Code::kTop;  // NaN too
  limited = limited > Code::kLeast ? limited : Code::kLeast;
  return (bits_of(limited + (1 - Code::kLeast)) + rounding - kOne) >> kDropped;
}

FASTAMP_HD FASTAMP_INLINE float decode_signed(std::uint8_t code, float scale) {
  const float value = product(value_of<SignedCode>(code & 127U), scale);
  return float_of(bits_of(value) | (static_cast<std::uint32_t>(code & 128U) << 24));
}

FASTAMP_HD FASTAMP_INLINE std::uint8_t encode_signed(float x, float inverse) {
  const std::uint32_t sign = (bits_of(x) >> 24) & 128U;
  const float value = product(float_of(magnitude_of(x)), inverse);
  return static_cast<std::uint8_t>(sign | code_of<SignedCode>(value, 1U << (kDropped - 1)));
}

FASTAMP_HD FASTAMP_INLINE float decode_unsigned(std::uint8_t code, float scale) {
  return product(value_of<UnsignedCode>(code), scale);
}

/// By the upper 16 bits of `noise`, kept a little from both ends: a decoded value gets its own
/// code.
FASTAMP_HD FASTAMP_INLINE std::uint8_t encode_unsigned(float x, float inverse,
                                                       std::uint32_t noise) {
  constexpr int kShift = kDropped - 16;
  const std::uint32_t rounding = ((noise >> 16) << kShift) + (1U << (kShift - 1));
  return static_cast<std::uint8_t>(code_of<UnsignedCode>(product(x, inverse), rounding));
}

}  // namespace fastamp
