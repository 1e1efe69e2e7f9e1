// What the binding's files share: a backend of one device, and a list of its tensors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "module.h"
#include "step/math.h"
#include "step/ops.h"
#include "tensor/tensors.h"

namespace fastamp {

constexpr std::int64_t kNumStats = sizeof(GradStats) / sizeof(float);

/// The ops for one device's tensors.
struct Backend {
  OpTable ops;
  bool is_apart;  ///< the host does not see what the device has done until it waits
  dlpack::Device device;
  py::object torch_device;  ///< the same, as torch's object

  Launch launch() const {
    if (device.type == dlpack::kCpu) return {num_threads(), 0, nullptr};
    return {num_threads(), device.index, current_stream(device.index)};
  }

  /// Returns the memory of an optional 0-dim float32 tensor on the device.
  float* optional_float(const py::object& tensor, const char* argument) const {
    if (tensor.is_none()) return nullptr;
    return static_cast<float*>(data_of(tensor, kFloat32, 1, device, argument));
  }
};

/// Tensors of one device, read once for several ops. It keeps them alive.
struct PackedTensors {
  py::object tensors;  ///< a tuple or list of all of them, `rest` included
  TensorList views;
  std::vector<std::int64_t> rest;  ///< indices of the tensors that the core does not handle
  std::int64_t num_chunks = 0;

  /// Adds a view of one of the tensors; skips an empty one.
  void add(const TensorView& view) {
    if (view.numel == 0) return;
    views.push_back(view);
    num_chunks += chunks_of(view.numel);
  }
};

/// Finds addresses that occur twice, so that no two threads write the same memory.
class AddressSet {
 public:
  explicit AddressSet(std::size_t expected) {
    std::size_t size = 16;
    while (2 * size < 3 * expected) size *= 2;
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

/// Finds tensors that overlap. Their order in memory is kept for the next step, which mostly finds
/// them where they were, and looks at each once.
class Ranges {
 public:
  void clear() { ranges_.clear(); }
  void add(const void* data, std::int64_t nbytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    if (nbytes > 0) ranges_.push_back({begin, begin + static_cast<std::uintptr_t>(nbytes)});
  }
  bool overlap() {
    if (order_.size() != ranges_.size()) {
      order_.resize(ranges_.size());
      std::iota(order_.begin(), order_.end(), std::size_t{0});
    }
    if (is_apart()) return false;
    std::sort(order_.begin(), order_.end(), [this](std::size_t one, std::size_t other) {
      return ranges_[one].begin < ranges_[other].begin;
    });
    return !is_apart();
  }

 private:
  struct Range {
    std::uintptr_t begin;
    std::uintptr_t end;
  };
  bool is_apart() const {
    for (std::size_t i = 1; i < order_.size(); ++i)
      if (ranges_[order_[i - 1]].end > ranges_[order_[i]].begin) return false;
    return true;
  }

  std::vector<Range> ranges_;
  std::vector<std::size_t> order_;
};

/// The statistics of a read, and the float64 sum that they come from.
struct Measured {
  py::object stats;  ///< kNumStats float32
  py::object work;   ///< float64, the sum first; none where the host has it
};

/// Reads every element once. The sum is kept in a tensor if `keeps_sum`, or if the device is apart.
/// Counts the step of the update that follows, if there is one.
Measured measure(const Backend& backend, const PackedTensors& tensors, const ClipSpec& clip,
                 bool keeps_sum, const UpdateList* counted = nullptr);

/// Returns how to clip, from the arguments of a call.
ClipSpec clip_of(const Backend& backend, const py::object& scale, const py::object& max_norm,
                 bool only_finite, const py::object& before, const py::object& skipped);

void define_update(py::module_& module, py::class_<Backend>& backend);

}  // namespace fastamp
