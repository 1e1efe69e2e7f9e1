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

/// Reads a group, or throws a Refusal. A learning rate on a device that is apart is not copied to
/// the host.
Group read_group(const RuleNames& names, bool is_lean, PyObject* group, const Backend& backend);

/// Returns a list or tuple, or throws a Refusal.
PyObject* as_list(PyObject* object, const char* name);

}  // namespace fastamp
