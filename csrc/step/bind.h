// What the binding's files share: a backend of one device, a list of its tensors, and the options
// of an optimizer's parameter group, by torch's names.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "module.h"
#include "step/math.h"
#include "step/ops.h"
#include "step/rules.h"
#include "tensor/tensors.h"

namespace fastamp {

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
};

/// Finds whether tensors share memory, which two threads would write. It remembers the order of
/// addresses, which is mostly that of the next step: nothing is sorted then.
class Ranges {
 public:
  void clear() { all_.clear(); }
  /// Adds a tensor; one without bytes shares nothing, wherever it is.
  void add(const void* data, std::int64_t nbytes) {
    const auto begin = nbytes == 0 ? 0 : reinterpret_cast<std::uintptr_t>(data);
    all_.push_back({begin, begin + static_cast<std::uintptr_t>(nbytes)});
  }
  bool overlap() {
    if (order_.size() != all_.size()) {
      order_.resize(all_.size());
      std::iota(order_.begin(), order_.end(), std::size_t{0});
    }
    const auto is_before = [this](std::size_t one, std::size_t other) {
      return all_[one].first < all_[other].first;
    };
    if (!std::is_sorted(order_.begin(), order_.end(), is_before))
      std::sort(order_.begin(), order_.end(), is_before);
    std::uintptr_t end = 0;
    for (const std::size_t place : order_) {
      if (all_[place].first < end) return true;
      end = all_[place].second;
    }
    return false;
  }

 private:
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> all_;  // begin and end
  std::vector<std::size_t> order_;
};

/// The statistics of a read, and the float64 sum that they come from.
struct Measured {
  py::object stats;  ///< float32
  py::object work;   ///< float64, the sum first; none where the host has it
  GradStats* values;
};

/// Reads every element once. The sum is kept in a tensor if `keeps_sum`, or if the device is apart.
/// Counts the step of the update that follows, if there is one.
Measured measure(const Backend& backend, const TensorList& views, const ClipSpec& clip,
                 bool keeps_sum, const UpdateList* counted = nullptr);

/// Returns how to clip, from the arguments of a call.
ClipSpec clip_of(const Backend& backend, const py::object& scale, const py::object& max_norm,
                 bool only_finite, const py::object& before, const py::object& skipped);

/// Why a step cannot be made as it was asked for: `Why` of fastamp/_ops.
struct Refusal {
  std::string reason;
  const char* kind = "torch";
};
inline const Refusal kNoState{"no state", "no state"};
inline const Refusal kNoGradient{"no parameter has a gradient", "no gradient"};

/// Returns a string for look-ups, which lives as long as the process; null for null.
PyObject* intern(const std::string& name);

/// A rule's names as Python's strings, in the declaration's order.
struct RuleNames {
  /// The names of a state, and of its codes and their scales.
  struct OfState {
    PyObject* state;
    PyObject* codes;
    PyObject* scales;
    PyObject* option;  ///< that it depends on; null: none
  };

  /// Throws a ValueError if no rule is declared by this name.
  explicit RuleNames(const std::string& rule);

  const Declaration* rule = nullptr;
  PyObject* options[kMaxOptions] = {};
  OfState states[kMaxStates] = {};
};

/// One parameter group, for one step.
struct Group {
  GroupOptions options;
  PyObject* params;                              ///< a list or tuple, borrowed
  const RuleNames::OfState* states[kMaxStates];  ///< those that its options ask for
  Stored formats[kMaxStates];  ///< of a lean optimizer's codes, without their addresses
  int num_states;
  bool counts_on_device;  ///< torch keeps its counts there: it is fused or capturable
  bool is_fused;
  bool is_exact;       ///< a lean optimizer's: bfloat16 parameters have a lower half
  std::uint32_t seed;  ///< a lean optimizer's
};

/// Returns a borrowed value; null where there is none.
PyObject* find(PyObject* dict, PyObject* name);

std::string text(PyObject* object);

/// Reads a group, or throws a Refusal. A learning rate on a device that is apart stays there.
Group read_group(const RuleNames& names, bool is_lean, PyObject* group, const Backend& backend);

/// Returns a list or tuple, or throws a Refusal.
PyObject* as_list(PyObject* object, const char* name);

void define_update(py::module_& module, py::class_<Backend>& backend);

}  // namespace fastamp
