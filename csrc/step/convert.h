// 16-bit floating-point formats to and from float32, in integer arithmetic that compilers turn into
// SIMD. Exact one way, round-to-nearest-even the other; no step depends on denormals being enabled.
#pragma once

#include <cstdint>
#include <cstring>

#include "support/macros.h"
#include "tensor/view.h"

namespace fastamp {

struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

FASTAMP_HD FASTAMP_INLINE float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

FASTAMP_HD FASTAMP_INLINE std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

FASTAMP_HD FASTAMP_INLINE float to_float(float x) { return x; }

FASTAMP_INLINE float to_float(BFloat16 x) {
  return float_of(static_cast<std::uint32_t>(x.bits) << 16);
}

FASTAMP_INLINE float to_float(Float16 x) {
  const std::uint32_t sign = (x.bits & 0x8000U) << 16;
  const std::uint32_t magnitude = (x.bits & 0x7fffU) << 13;  // exponent still biased by 15
  const std::uint32_t normal = magnitude + (112U << 23);
  const std::uint32_t infinite = magnitude | 0x7f800000U;
  // 2^-14 + m * 2^-24 is normal in float32; taking 2^-14 away leaves the denormal's value.
  const std::uint32_t denormal = bits_of(float_of(magnitude + (113U << 23)) - float_of(113U << 23));
  const std::uint32_t bits = magnitude < (1U << 23)     ? denormal
                             : magnitude >= (31U << 23) ? infinite
                                                        : normal;
  return float_of(bits | sign);
}

FASTAMP_HD FASTAMP_INLINE void from_float(float x, float* out) { *out = x; }

FASTAMP_INLINE void from_float(float x, BFloat16* out) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const bool nan = (bits & 0x7fffffffU) > 0x7f800000U;
  out->bits = static_cast<std::uint16_t>(nan ? (bits >> 16) | 0x40U : rounded);
}

FASTAMP_INLINE void from_float(float x, Float16* out) {
  const std::uint32_t sign = (bits_of(x) >> 16) & 0x8000U;
  const std::uint32_t bits = bits_of(x) & 0x7fffffffU;
  const std::uint32_t infinite_or_nan = bits > 0x7f800000U ? 0x7e00U : 0x7c00U;
  // Adding 0.5 lets the float32 adder round to multiples of 2^-24, the denormals' step.
  const std::uint32_t denormal = bits_of(float_of(bits) + 0.5F) - bits_of(0.5F);
  const std::uint32_t normal = (bits - (112U << 23) + 0xfffU + ((bits >> 13) & 1U)) >> 13;
  const std::uint32_t magnitude = bits >= (143U << 23)  ? infinite_or_nan
                                  : bits < (113U << 23) ? denormal
                                                        : normal;
  out->bits = static_cast<std::uint16_t>(sign | magnitude);
}

/// The one place that turns a Format into a type, of host or device; codes are no numbers.
template <typename Bfloat, typename Half, typename Fn>
FASTAMP_HD FASTAMP_INLINE auto visit_types(Format format, Fn fn) {
  if (format == Format::kBFloat16) return fn(Bfloat{});
  if (format == Format::kFloat16) return fn(Half{});
  return fn(float{});
}

template <typename Fn>
FASTAMP_INLINE auto visit_host_format(Format format, Fn fn) {
  return visit_types<BFloat16, Float16>(format, fn);
}

}  // namespace fastamp
