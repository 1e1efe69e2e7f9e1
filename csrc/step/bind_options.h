// The options of an optimizer's parameter group, as torch names them.
#pragma once

#include <optional>
#include <string>

#include "step/update.h"
#include "tensor/tensors.h"

namespace fastamp {

/// Why torch has to make the step itself.
struct Refusal {
  std::string reason;
};

inline PyObject* intern(const char* name) { return PyUnicode_InternFromString(name); }

/// The names that torch's optimizers give to their options and states.
struct Keys {
  PyObject* params = intern("params");
  PyObject* lr = intern("lr");
  PyObject* weight_decay = intern("weight_decay");
  PyObject* eps = intern("eps");
  PyObject* betas = intern("betas");
  PyObject* momentum = intern("momentum");
  PyObject* dampening = intern("dampening");
  PyObject* lr_decay = intern("lr_decay");
  PyObject* decoupled = intern("decoupled_weight_decay");
  PyObject* maximize = intern("maximize");
  PyObject* amsgrad = intern("amsgrad");
  PyObject* nesterov = intern("nesterov");
  PyObject* fused = intern("fused");
  PyObject* foreach = intern("foreach");
  PyObject* capturable = intern("capturable");
  PyObject* differentiable = intern("differentiable");
  PyObject* step = intern("step");
  PyObject* exp_avg = intern("exp_avg");
  PyObject* exp_avg_sq = intern("exp_avg_sq");
  PyObject* max_exp_avg_sq = intern("max_exp_avg_sq");
  PyObject* momentum_buffer = intern("momentum_buffer");
  PyObject* sum = intern("sum");
};

const Keys& keys();

/// Returns a borrowed value; null where there is none.
PyObject* find(PyObject* dict, PyObject* name);

/// Says whether an option is set; `otherwise` where there is none.
bool is_true(PyObject* group, PyObject* name, bool otherwise = false);

std::string text(PyObject* object);

/// Reads the options of a group, or throws a Refusal. A learning rate on the device `apart` is not
/// copied to the host. `decoupled` is the default of the optimizer's class.
GroupOptions read_options(Rule rule, bool decoupled, PyObject* group,
                          std::optional<dlpack::Device> apart);

/// Returns the list of a group's parameters, borrowed.
PyObject* params_of(PyObject* group);

}  // namespace fastamp
