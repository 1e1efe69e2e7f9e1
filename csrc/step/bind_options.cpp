// See bind_options.h.
#include "step/bind_options.h"

namespace fastamp {
namespace {

/// The names that all torch's optimizers give to these options.
struct Keys {
  PyObject* params = PyUnicode_InternFromString("params");
  PyObject* lr = PyUnicode_InternFromString("lr");
  PyObject* fused = PyUnicode_InternFromString("fused");
  PyObject* foreach = PyUnicode_InternFromString("foreach");
  PyObject* capturable = PyUnicode_InternFromString("capturable");
  PyObject* differentiable = PyUnicode_InternFromString("differentiable");
  PyObject* exact = PyUnicode_InternFromString("exact");
  PyObject* seed = PyUnicode_InternFromString("seed");
};

const Keys& keys() {
  static const Keys found;
  return found;
}

/// A declaration's names as Python's strings, in its order.
struct Names {
  explicit Names(const Declaration& rule) {
    const auto intern = [](const auto& from, PyObject** to) {
      for (const auto& each : from)
        *to++ = each.name == nullptr ? nullptr : PyUnicode_InternFromString(each.name);
    };
    intern(rule.numbers, numbers);
    intern(rule.flags, flags);
    for (int i = 0; i < kMaxStates; ++i) {
      const State& state = rule.states[i];
      if (state.name == nullptr) continue;
      const std::string name = state.name;
      states[i] = {PyUnicode_InternFromString(state.name),
                   PyUnicode_InternFromString((name + "_codes").c_str()),
                   PyUnicode_InternFromString((name + "_scale").c_str())};
      if (state.option != nullptr) options[i] = PyUnicode_InternFromString(state.option);
    }
  }
  PyObject* numbers[kMaxOptions];
  PyObject* flags[kMaxOptions];
  StateNames states[kMaxStates] = {};
  PyObject* options[kMaxStates] = {};  ///< that the states depend on
};

const Names& names_of(const Declaration& rule) {
  static const std::vector<Names> all(std::begin(kDeclarations), std::end(kDeclarations));
  return all[static_cast<std::size_t>(&rule - std::begin(kDeclarations))];
}

bool is_true(PyObject* group, PyObject* name) {
  PyObject* value = find(group, name);
  if (value == nullptr) return false;
  const int answer = PyObject_IsTrue(value);
  if (answer < 0) throw py::error_already_set();
  return answer != 0;
}

/// Reads a number. A learning rate may be a tensor; reading one on a device waits.
double number(PyObject* value, PyObject* name, bool may_be_tensor = false) {
  if (value == nullptr || (!PyFloat_Check(value) && !PyLong_Check(value) && !may_be_tensor))
    throw Refusal{text(name) + " is not a number"};
  const double found = PyFloat_AsDouble(value);
  if (found != -1 || !PyErr_Occurred()) return found;
  if (!PyErr_ExceptionMatches(PyExc_Exception)) throw py::error_already_set();
  PyErr_Clear();  // torch's step raises its own error
  throw Refusal{text(name) + " is not a number"};
}

void read_number(PyObject* value, PyObject* name, const Number& number_of, GroupOptions& options) {
  if (number_of.place == nullptr) {
    if (number(value, name) != 0) throw Refusal{text(name) + " is not 0"};
    return;
  }
  if (number_of.second == nullptr) {
    options.*number_of.place = number(value, name);
    return;
  }
  const auto pair = py::reinterpret_steal<py::object>(
      value == nullptr ? nullptr : PySequence_Fast(value, "expected two numbers"));
  if (!pair || PySequence_Fast_GET_SIZE(pair.ptr()) != 2) {
    PyErr_Clear();
    throw Refusal{text(name) + " are not two numbers"};
  }
  options.*number_of.place = number(PySequence_Fast_GET_ITEM(pair.ptr(), 0), name);
  options.*number_of.second = number(PySequence_Fast_GET_ITEM(pair.ptr(), 1), name);
}

/// Refuses the options that ask for torch's own implementations.
void check_implementation(PyObject* group, Group& found, bool is_apart) {
  PyObject* fused = find(group, keys().fused);
  PyObject* foreach = find(group, keys().foreach);
  const bool left_open = fused == nullptr || fused == Py_None;
  if (fused == Py_False) throw Refusal{"fused=False"};
  if (left_open && foreach != nullptr && foreach != Py_None)
    throw Refusal{foreach == Py_False ? "foreach=False" : "foreach=True"};
  if (is_true(group, keys().differentiable)) throw Refusal{"differentiable=True"};
  const bool capturable = is_true(group, keys().capturable);
  if (capturable && !is_apart) throw Refusal{"capturable=True on the CPU"};
  found.is_fused = !left_open;
  found.counts_on_device = found.is_fused || capturable;
}

/// Returns the address of a learning rate on the tensors' device, so that nothing waits for it.
const float* rate_on_device(PyObject* lr, dlpack::Device device) {
  if (lr == nullptr || PyFloat_Check(lr) || PyLong_Check(lr)) return nullptr;
  const auto found = read_dense(lr, device);
  if (found && found->format == Format::kFloat32 && found->numel == 1)
    return static_cast<const float*>(found->data);
  HostTensor on_host;
  if (!read_host_tensor(lr, on_host)) throw Refusal{"lr is not a number that can be read here"};
  return nullptr;
}

}  // namespace

PyObject* find(PyObject* dict, PyObject* name) {
  PyObject* value = PyDict_GetItemWithError(dict, name);
  if (value == nullptr && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

std::string text(PyObject* object) { return py::str(py::handle(object)); }

py::object as_list(PyObject* sequence, const char* name) {
  auto found = py::reinterpret_steal<py::object>(
      sequence == nullptr ? nullptr : PySequence_Fast(sequence, ""));
  if (found) return found;
  PyErr_Clear();
  throw Refusal{std::string(name) + " cannot be iterated"};
}

Group read_group(const Declaration& rule, bool is_lean, PyObject* group, const Backend& backend) {
  if (!PyDict_Check(group)) throw Refusal{"a parameter group is not a dict"};
  Group found{};
  check_implementation(group, found, backend.is_apart);
  found.params = as_list(find(group, keys().params), "params");
  GroupOptions& options = found.options;
  PyObject* lr = find(group, keys().lr);
  if (backend.is_apart) options.lr_on_device = rate_on_device(lr, backend.device);
  if (options.lr_on_device == nullptr) options.lr = number(lr, keys().lr, true);
  const Names& names = names_of(rule);
  for (int i = 0; i < kMaxOptions && names.numbers[i] != nullptr; ++i)
    read_number(find(group, names.numbers[i]), names.numbers[i], rule.numbers[i], options);
  for (int i = 0; i < kMaxOptions && names.flags[i] != nullptr; ++i)
    options.*rule.flags[i].place = is_true(group, names.flags[i]);
  for (int i = 0; i < kMaxStates && names.states[i].state != nullptr; ++i)
    if (names.options[i] == nullptr || is_true(group, names.options[i]))
      found.states[found.num_states++] = names.states[i];
  if (!is_lean) return found;
  found.is_exact = is_true(group, keys().exact);
  found.seed = static_cast<std::uint32_t>(number(find(group, keys().seed), keys().seed));
  visit_rule(rule.rule, options, [&](auto kind) {
    for (int s = 0; s < found.num_states; ++s)
      found.formats[s] = {nullptr, nullptr, kind.code_of(s), kind.is_random(s)};
  });
  return found;
}

}  // namespace fastamp
