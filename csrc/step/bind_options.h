// The options of an optimizer's parameter group, and the names of its states, as torch has them.
#pragma once

#include <string>

#include "step/bind.h"
#include "step/rules.h"

namespace fastamp {

/// Why a step cannot be made as it was asked for. What follows depends on the kind: fastamp/_ops'
/// `Why`.
struct Refusal {
  std::string reason;
  const char* kind = "torch";
};
inline const Refusal kNoState{"no state", "no state"};
inline const Refusal kNoGradient{"no parameter has a gradient", "no gradient"};

/// The names of a state, and of its codes and their scales; borrowed.
struct StateNames {
  PyObject* state;
  PyObject* codes;
  PyObject* scales;
};

/// One parameter group, for one step.
struct Group {
  GroupOptions options;
  py::object params;              ///< a list or tuple
  StateNames states[kMaxStates];  ///< those that its options ask for
  Stored formats[kMaxStates];     ///< of a lean optimizer's codes, without their addresses
  int num_states;
  bool counts_on_device;  ///< torch keeps its counts there: it is fused or capturable
  bool is_fused;
  bool is_exact;       ///< a lean optimizer's: bfloat16 parameters have a lower half
  std::uint32_t seed;  ///< a lean optimizer's
};

/// Returns a borrowed value; null where there is none.
PyObject* find(PyObject* dict, PyObject* name);

std::string text(PyObject* object);

/// Reads a group, or throws a Refusal. A learning rate on a device that is apart is not copied to
/// the host.
Group read_group(const Declaration& rule, bool is_lean, PyObject* group, const Backend& backend);

/// Returns a sequence of any kind as a list or tuple, or throws a Refusal.
py::object as_list(PyObject* sequence, const char* name);

}  // namespace fastamp
