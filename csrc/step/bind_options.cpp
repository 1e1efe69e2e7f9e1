// Reads the options of a parameter group.
#include "step/bind.h"

namespace fastamp {
namespace {

/// The names that all torch's optimizers give to these options, and the lean ones to the last two.
struct Keys {
  PyObject* params = intern("params");
  PyObject* lr = intern("lr");
  PyObject* fused = intern("fused");
  PyObject* foreach = intern("foreach");
  PyObject* capturable = intern("capturable");
  PyObject* differentiable = intern("differentiable");
  PyObject* exact = intern("exact");
  PyObject* seed = intern("seed");
};

const Keys& keys() {
  static const Keys found;
  return found;
}

bool is_true(PyObject* group, PyObject* name) {
  PyObject* value = find(group, name);
  if (value == nullptr) return false;
  const int answer = PyObject_IsTrue(value);
  if (answer < 0) throw py::error_already_set();
  return answer != 0;
}

/// Reads a number or a flag. A learning rate may be a tensor; reading one on a device waits.
double number(PyObject* value, PyObject* name, bool may_be_tensor = false) {
  if (value != nullptr && (PyFloat_Check(value) || PyLong_Check(value) || may_be_tensor)) {
    const double found = PyFloat_AsDouble(value);
    if (found != -1 || !PyErr_Occurred()) return found;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw py::error_already_set();
    PyErr_Clear();  // torch's step raises its own error
  }
  throw Refusal{text(name) + " is not a number"};
}

void read_option(PyObject* value, PyObject* name, const Option& option, GroupOptions& options) {
  if (value == nullptr && option.place == nullptr) return;  // a lean optimizer lacks some
  if (option.second != nullptr) {
    PyObject* const pair = as_list(value, option.name);
    if (PySequence_Fast_GET_SIZE(pair) != 2) throw Refusal{text(name) + " are not two numbers"};
    options.*option.second = number(PySequence_Fast_GET_ITEM(pair, 1), name);
    value = PySequence_Fast_GET_ITEM(pair, 0);
  }
  const double found = number(value, name);
  if (option.place != nullptr)
    options.*option.place = found;
  else if (found != 0)
    throw Refusal{text(name) + " is not 0"};
}

/// Refuses the options that ask for torch's own implementations.
void check_implementation(PyObject* group, Group& found, bool is_apart) {
  PyObject* fused = find(group, keys().fused);
  PyObject* foreach = find(group, keys().foreach);
  found.is_fused = fused != nullptr && fused != Py_None;
  if (fused == Py_False) throw Refusal{"fused=False"};
  if (!found.is_fused && foreach != nullptr && foreach != Py_None)
    throw Refusal{foreach == Py_False ? "foreach=False" : "foreach=True"};
  if (is_true(group, keys().differentiable)) throw Refusal{"differentiable=True"};
  const bool capturable = is_true(group, keys().capturable);
  if (capturable && !is_apart) throw Refusal{"capturable=True on the CPU"};
  found.counts_on_device = found.is_fused || capturable;
}

/// Returns the address of a learning rate on the tensors' device, so that nothing waits for it.
const float* rate_on_device(PyObject* lr, dlpack::Device device) {
  if (lr == nullptr || PyFloat_Check(lr) || PyLong_Check(lr)) return nullptr;
  dlpack::Tensor found;
  if (read_dense(lr, device, found) && found.dtype == kFloat32 && found.numel() == 1)
    return static_cast<const float*>(found.data);
  if (!read_host_tensor(lr, found)) throw Refusal{"lr is not a number that can be read here"};
  return nullptr;
}

}  // namespace

PyObject* intern(const std::string& name) { return PyUnicode_InternFromString(name.c_str()); }

RuleNames::RuleNames(const std::string& name) {
  for (const Declaration& each : kDeclarations)
    if (name == each.name) rule = &each;
  if (rule == nullptr) throw py::value_error("rule: " + name + " is not declared in step/rules.h");
  for (int i = 0; i < kMaxOptions && rule->options[i].name != nullptr; ++i)
    options[i] = intern(rule->options[i].name);
  for (int i = 0; i < kMaxStates && rule->states[i].name != nullptr; ++i) {
    const std::string state = rule->states[i].name;
    const char* const option = rule->states[i].option;
    states[i] = {intern(state), intern(state + "_codes"), intern(state + "_scale"),
                 option == nullptr ? nullptr : intern(option)};
  }
}

PyObject* find(PyObject* dict, PyObject* name) {
  PyObject* value = PyDict_GetItemWithError(dict, name);
  if (value == nullptr && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

std::string text(PyObject* object) { return py::str(py::handle(object)); }

PyObject* as_list(PyObject* object, const char* name) {
  if (object == nullptr || (!PyList_Check(object) && !PyTuple_Check(object)))
    throw Refusal{std::string(name) + " is not a list"};
  return object;
}

Group read_group(const RuleNames& names, bool is_lean, PyObject* group, const Backend& backend) {
  if (!PyDict_Check(group)) throw Refusal{"a parameter group is not a dict"};
  Group found{};
  check_implementation(group, found, backend.is_apart);
  found.params = as_list(find(group, keys().params), "params");
  GroupOptions& options = found.options;
  PyObject* lr = find(group, keys().lr);
  if (backend.is_apart) options.lr_on_device = rate_on_device(lr, backend.device);
  if (options.lr_on_device == nullptr) options.lr = number(lr, keys().lr, true);
  for (int i = 0; i < kMaxOptions && names.options[i] != nullptr; ++i)
    read_option(find(group, names.options[i]), names.options[i], names.rule->options[i], options);
  for (const RuleNames::OfState& state : names.states)
    if (state.state != nullptr && (state.option == nullptr || is_true(group, state.option)))
      found.states[found.num_states++] = &state;
  if (!is_lean) return found;
  found.is_exact = is_true(group, keys().exact);
  found.seed = static_cast<std::uint32_t>(number(find(group, keys().seed), keys().seed));
  visit_rule(names.rule->rule, options, [&](auto kind) {
    for (int s = 0; s < found.num_states; ++s)
      found.formats[s] = {nullptr, nullptr, kind.code_of(s), kind.is_random(s)};
  });
  return found;
}

}  // namespace fastamp
