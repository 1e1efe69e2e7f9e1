// Step counts that are on the host while a device updates. So that nothing waits, the host counts
// every step, and the device counts those that it skips, in a slot for each parameter. They are
// subtracted before the counts are read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "step/bind.h"

namespace fastamp {

class HostCounts {
 public:
  /// The counts that take part in a step: the parameter's place in the list, and its slot.
  using Taken = std::vector<std::pair<std::size_t, std::size_t>>;

  void begin() { next_ = 0; }

  /// Adds the count of a parameter to a step. A count that has changed since the last step was set
  /// by somebody else: no skipped step is subtracted from it.
  void add(py::handle param, float* place, std::size_t index, ParameterView& view, Taken& taken) {
    const std::size_t slot = slot_of(param.ptr());
    Count& count = counts_[slot];
    if (count.place != place || count.left != *place) count = {place, *place, true};
    view.counted = *place;
    view.counting = count.is_new ? Counting::kHostAnew : Counting::kHost;
    taken.emplace_back(index, slot);
  }

  /// Gives the added parameters their slots; `slots` has `size()` floats on the device.
  void attach(UpdateList& list, const Taken& taken, float* slots) const {
    for (const auto& [index, slot] : taken) {
      if (slot >= counts_.size())
        throw std::runtime_error("another thread read the optimizer's state during its step");
      list.parameters[index].step = slots + slot;
    }
  }

  /// Counts the step.
  void advance(const Taken& taken) {
    for (const auto& [index, slot] : taken) {
      if (slot >= counts_.size()) continue;  // settled during the update
      Count& count = counts_[slot];
      count.left = *count.place += 1;
      count.is_new = false;
    }
  }

  /// Subtracts the skipped steps from the counts in an optimizer's states; `slots` is a copy of the
  /// device's, and `name` the key of a count. A count whose address has changed is left as it is.
  void settle(const std::vector<float>& slots, const py::dict& states, py::handle name) {
    std::unordered_map<const void*, std::size_t> by_place;
    for (std::size_t slot = 0; slot < counts_.size() && slot < slots.size(); ++slot)
      by_place[counts_[slot].place] = slot;
    for (const auto& [param, state] : states) {
      if (!PyDict_Check(state.ptr())) continue;
      PyObject* tensor = PyDict_GetItemWithError(state.ptr(), name.ptr());
      const auto found = tensor == nullptr ? std::nullopt : read_dense(tensor, kHost);
      if (!found || found->dtype != DType::kFloat32 || found->numel != 1) continue;
      const auto known = by_place.find(found->data);
      if (known == by_place.end()) continue;
      const Count& count = counts_[known->second];
      if (*count.place == count.left && !count.is_new) *count.place += slots[known->second];
    }
    *this = {};
  }

  std::size_t size() const { return counts_.size(); }

 private:
  struct Count {
    float* place;  ///< read only if a state still has it: the tensor may be gone
    float left;    ///< at the end of the last step
    bool is_new;   ///< the device has not set the slot yet
  };

  /// Parameters mostly come in the order of the step before.
  std::size_t slot_of(PyObject* param) {
    if (next_ < params_.size() && params_[next_] == param) return next_++;
    const auto [found, is_new] = slots_.try_emplace(param, counts_.size());
    if (is_new) {
      counts_.push_back({nullptr, 0, true});
      params_.push_back(param);
    }
    next_ = found->second + 1;
    return found->second;
  }

  std::vector<Count> counts_;      // by slot
  std::vector<PyObject*> params_;  // by slot; never dereferenced: one may be gone
  std::unordered_map<PyObject*, std::size_t> slots_;
  std::size_t next_ = 0;
};

}  // namespace fastamp
