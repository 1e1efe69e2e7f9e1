// Tensors as plain data, for code that knows neither Python nor torch.
#pragma once

#include <cstdint>
#include <vector>

#include "support/macros.h"

namespace fastamp {

/// How numbers are kept. Those of 8 bits are codes of step/formats.h, and have scales.
enum class Format : std::uint8_t { kFloat32, kBFloat16, kFloat16, kSigned8, kUnsigned8 };

FASTAMP_HD constexpr bool is_coded(Format format) { return format >= Format::kSigned8; }

FASTAMP_HD constexpr std::int64_t size_of(Format format) {
  return format == Format::kFloat32 ? 4 : is_coded(format) ? 1 : 2;
}

/// Memory of one tensor whose elements fill it without gaps, in any order of dimensions.
struct TensorView {
  void* data;
  std::int64_t numel;
  Format format;
};

using TensorList = std::vector<TensorView>;

}  // namespace fastamp
