// See bind_options.h.
#include "step/bind_options.h"

namespace fastamp {

const Keys& keys() {
  static const Keys found;
  return found;
}

PyObject* find(PyObject* dict, PyObject* name) {
  PyObject* value = PyDict_GetItemWithError(dict, name);
  if (value == nullptr && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

std::string text(PyObject* object) { return py::str(py::handle(object)); }

bool is_true(PyObject* group, PyObject* name, bool otherwise) {
  PyObject* value = find(group, name);
  if (value == nullptr) return otherwise;
  const int answer = PyObject_IsTrue(value);
  if (answer < 0) throw py::error_already_set();
  return answer != 0;
}

namespace {

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

/// Refuses the options that ask for torch's own implementations.
void check_implementation(PyObject* group) {
  PyObject* fused = find(group, keys().fused);
  PyObject* foreach = find(group, keys().foreach);
  const bool left_open = fused == nullptr || fused == Py_None;
  if (fused == Py_False) throw Refusal{"fused=False"};
  if (left_open && foreach != nullptr && foreach != Py_None)
    throw Refusal{foreach == Py_False ? "foreach=False" : "foreach=True"};
  for (PyObject* name : {keys().capturable, keys().differentiable})
    if (is_true(group, name)) throw Refusal{text(name) + "=True"};
}

/// Returns the address of a learning rate on the tensors' device, so that nothing waits for it.
const float* rate_on_device(PyObject* lr, dlpack::Device device) {
  if (lr == nullptr || PyFloat_Check(lr) || PyLong_Check(lr)) return nullptr;
  const auto found = read_dense(lr, device);
  if (found && found->dtype == DType::kFloat32 && found->numel == 1)
    return static_cast<const float*>(found->data);
  HostTensor on_host;
  if (!read_host_tensor(lr, on_host)) throw Refusal{"lr is not a number that can be read here"};
  return nullptr;
}

}  // namespace

GroupOptions read_options(Rule rule, bool decoupled, PyObject* group,
                          std::optional<dlpack::Device> apart) {
  const Keys& k = keys();
  check_implementation(group);
  GroupOptions options{};
  PyObject* lr = find(group, k.lr);
  if (apart) options.lr_on_device = rate_on_device(lr, *apart);
  if (options.lr_on_device == nullptr) options.lr = number(lr, k.lr, true);
  options.weight_decay = number(find(group, k.weight_decay), k.weight_decay);
  options.maximize = is_true(group, k.maximize);
  if (rule != Rule::kSgd) options.eps = number(find(group, k.eps), k.eps);
  switch (rule) {
    case Rule::kAdam: {
      PyObject* betas = find(group, k.betas);
      const auto pair = py::reinterpret_steal<py::object>(
          betas == nullptr ? nullptr : PySequence_Fast(betas, "betas: expected two numbers"));
      if (!pair || PySequence_Fast_GET_SIZE(pair.ptr()) != 2) {
        PyErr_Clear();
        throw Refusal{"betas are not two numbers"};
      }
      options.beta1 = number(PySequence_Fast_GET_ITEM(pair.ptr(), 0), k.betas);
      options.beta2 = number(PySequence_Fast_GET_ITEM(pair.ptr(), 1), k.betas);
      options.amsgrad = is_true(group, k.amsgrad);
      options.decoupled = is_true(group, k.decoupled, decoupled);
      break;
    }
    case Rule::kSgd:
      options.momentum = number(find(group, k.momentum), k.momentum);
      options.dampening = number(find(group, k.dampening), k.dampening);
      options.nesterov = is_true(group, k.nesterov);
      break;
    case Rule::kAdagrad:
      options.lr_decay = number(find(group, k.lr_decay), k.lr_decay);
  }
  return options;
}

PyObject* params_of(PyObject* group) {
  PyObject* params = find(group, keys().params);
  if (params == nullptr || !PyList_Check(params)) throw Refusal{"params are not a list"};
  return params;
}

}  // namespace fastamp
