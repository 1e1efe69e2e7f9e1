// Tensors as plain data, for code that knows neither Python nor torch.
#pragma once

#include <cstdint>
#include <vector>

#include "support/macros.h"

namespace fastamp {

enum class DType : std::uint8_t { kFloat32, kBFloat16, kFloat16 };

FASTAMP_HD constexpr std::int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

/// Memory of one tensor whose elements fill it without gaps, in any order of dimensions.
struct TensorView {
  void* data;
  std::int64_t numel;
  DType dtype;
};

using TensorList = std::vector<TensorView>;

}  // namespace fastamp
