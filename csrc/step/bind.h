// What the binding's files share: a packed list of tensors, and how it is launched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "module.h"
#include "step/math.h"
#include "step/ops.h"
#include "tensor/tensors.h"

namespace fastamp {

/// A list of tensors of one device, read once for several ops. It keeps them alive.
struct PackedTensors {
  py::object tensors;              ///< a tuple or list of all of them, `rest` included
  std::optional<int> cuda_device;  ///< none: the CPU
  TensorList views;
  std::vector<std::int64_t> rest;  ///< indices of the tensors that the core does not handle
  std::int64_t num_chunks = 0;
  bool has_float16 = false;  ///< among those that it handles
};

/// Finds addresses that occur twice, so that no two threads write the same memory.
class AddressSet {
 public:
  explicit AddressSet(std::size_t expected) {
    std::size_t size = 16;
    while (size < 2 * expected) size *= 2;
    slots_.resize(size, nullptr);
  }
  bool insert(const void* address) {
    const std::size_t mask = slots_.size() - 1;
    // Fibonacci hashing; allocators align to 64 bytes, so the low bits say nothing.
    std::size_t i =
        (reinterpret_cast<std::uintptr_t>(address) * 0x9e3779b97f4a7c15ULL >> 20) & mask;
    for (; slots_[i] != nullptr; i = (i + 1) & mask)
      if (slots_[i] == address) return false;
    slots_[i] = address;
    return true;
  }

 private:
  std::vector<const void*> slots_;
};

/// Adds a view of one of the packed tensors; skips an empty one.
inline void add_view(PackedTensors& packed, const TensorView& view) {
  if (view.numel == 0) return;
  packed.views.push_back(view);
  packed.num_chunks += chunks_of(view.numel);
  packed.has_float16 |= view.dtype == DType::kFloat16;
}

inline dlpack::Device device_of(std::optional<int> cuda_device) {
  return cuda_device ? dlpack::Device{dlpack::kCuda, *cuda_device} : kHost;
}

inline Launch launch_on(std::optional<int> cuda_device, int num_threads) {
  if (!cuda_device) return {num_threads, 0, nullptr};
  return {num_threads, *cuda_device, current_stream(*cuda_device)};
}

/// Returns the memory of an optional 0-dim float32 tensor.
inline float* optional_float(const py::object& tensor, const char* argument) {
  return tensor.is_none() ? nullptr : static_cast<float*>(data_of(tensor, kFloat32, 1, argument));
}

constexpr std::int64_t kNumStats = sizeof(GradStats) / sizeof(float);

void define_update(py::module_& module, py::class_<OpTable>& ops);

}  // namespace fastamp
