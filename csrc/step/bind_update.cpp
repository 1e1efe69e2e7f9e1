// A whole step in one call. The optimizer's options, parameters, gradients and states are read anew
// each time, so that nothing can be stale.
#include <pybind11/stl.h>

#include <utility>

#include "step/bind.h"
#include "step/formats.h"

namespace fastamp {
namespace {

/// Prefetches memory in the order in which the last step read it: of thousands of tensors, the
/// caches have lost most since then. Prefetching a stale address does no harm.
class Prefetcher {
 public:
  void begin() {
    last_.swap(now_);
    now_.clear();
    next_ = 0;
    for (int i = 0; i < kAhead; ++i) prefetch();
  }
  void add(const void* address) {
    now_.push_back(static_cast<const char*>(address));
    prefetch();
  }
  /// torch keeps a tensor's sizes among its other fields.
  void add(py::handle tensor, const dlpack::Tensor& found) {
    add(tensor.ptr());
    for (int line = -2; line <= 1; ++line) add(reinterpret_cast<char*>(found.shape) + 64 * line);
  }

 private:
  static constexpr int kAhead = 128;  // lines of the cache: some five parameters

  void prefetch() {
    if (next_ < last_.size()) __builtin_prefetch(last_[next_++]);
  }

  std::vector<const char*> last_;
  std::vector<const char*> now_;
  std::size_t next_ = 0;
};

/// One optimizer's gradients, parameters and states, read for one step.
struct ReadStep : PackedTensors {
  py::list params;          ///< those that have a gradient
  bool owns_grads = false;  ///< whether the gradients are the parameters' `.grad`
  UpdateList list{};
  std::vector<py::object> alive;  ///< all of them: another thread may replace a state in its dict
};

/// What is remembered of an optimizer between its steps: nothing that can be stale.
struct Update {
  Update(const std::string& rule, bool with_formats) : names(rule), is_lean(with_formats) {}

  RuleNames names;
  bool is_lean;
  Ranges ranges;  ///< of several optimizers the first one's have all memory
  Prefetcher prefetcher;
};

/// Reads one optimizer for one step; throws a Refusal where something does not fit.
class Reader {
 public:
  Reader(const Backend& backend, Update& update, PyObject* states, ReadStep& step, Ranges& ranges)
      : backend_(backend), update_(update), states_(states), step_(step), ranges_(ranges) {}

  /// Adds the parameters of a group that have a gradient. `grads` are those of all groups from
  /// `place` on, or None: each parameter's own.
  void add_group(PyObject* dict, const py::object& grads, Py_ssize_t& place) {
    group_ = read_group(update_.names, update_.is_lean, dict, backend_);
    step_.list.groups.push_back(group_.options);
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(group_.params);
    if (step_.list.parameters.empty())
      step_.list.parameters.reserve(static_cast<std::size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      const auto param =
          py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(group_.params, i));
      const auto grad =
          grads.is_none()
              ? grad_of(param)
              : py::reinterpret_borrow<py::object>(PyList_GET_ITEM(grads.ptr(), place++));
      if (!grad) throw Refusal{"a parameter is of another type", "halves"};
      if (grad.is_none()) continue;
      step_.params.append(param);
      grads_.append(grad);
      add(param, grad);
    }
  }

 private:
  void add(py::handle param, py::handle grad) {
    ParameterView view{};
    dlpack::Tensor other;
    if (!read_floats(param, layout_, view.param))
      throw Refusal{"a parameter's dtype, layout or device"};
    if (!read_floats(grad, other, view.grad)) throw Refusal{"a gradient's dtype, layout or device"};
    if (view.grad.format == Format::kFloat16 && !group_.is_fused)
      throw Refusal{"float16 gradients of an optimizer that is not fused"};
    view.numel = layout_.numel();
    if (is_negated(param, view.numel) || is_negated(grad, view.numel))
      throw Refusal{"a negated view"};
    view.row = 1;
    view.group = static_cast<std::uint32_t>(step_.list.groups.size() - 1);
    step_.views.push_back({view.grad.data, view.numel, view.grad.format});
    const bool counts = update_.names.rule->counts || update_.is_lean;
    if (group_.num_states > 0 || counts) state_ = state_of(param.ptr());
    if (update_.is_lean) read_weights(view);
    for (int s = 0; s < group_.num_states; ++s) {
      view.states[s] = read_state(s, view);
      if (is_coded(view.states[s].format) != view.has_codes() ||
          (!view.has_codes() && view.states[s].format != view.states[0].format))
        throw Refusal{"the states' dtypes differ"};
    }
    if (counts) view.step = read_count();
    step_.list.parameters.push_back(view);
  }

  /// Finds a parameter's state. The optimizer's dict mostly has them in the parameters' order, and
  /// a look at the next entry takes a tenth of the time that torch's hash of a tensor does.
  PyObject* state_of(PyObject* param) {
    Py_ssize_t next = place_;
    PyObject* name = nullptr;
    PyObject* state = nullptr;
    if (PyDict_Next(states_, &next, &name, &state) && name == param)
      place_ = next;
    else
      state = find(states_, param);
    if (state == nullptr || !PyDict_Check(state)) throw kNoState;
    update_.prefetcher.add(state);
    return state;
  }

  /// Reads how a lean optimizer keeps the parameter.
  void read_weights(ParameterView& view) {
    static PyObject* const low = intern("low");
    if (view.param.format == Format::kFloat16) throw Refusal{"a parameter is float16"};
    const std::int64_t rows = layout_.ndim == 0 ? 1 : std::max<std::int64_t>(layout_.shape[0], 1);
    const std::int64_t row = std::max<std::int64_t>(view.numel / rows, 1);
    if (row >= std::int64_t{1} << 31) throw Refusal{"a parameter's row has 2^31 elements"};
    view.row = static_cast<std::uint32_t>(row);
    view.seed = group_.seed;
    const bool is_short = view.param.format == Format::kBFloat16;
    view.param.is_random = is_short && !group_.is_exact;
    if (!is_short || !group_.is_exact) {
      if (find(state_, low) != nullptr) throw Refusal{"low: exact or a dtype was changed"};
      return;
    }
    // Two neighboring bytes for each element of the parameter, in its order.
    dlpack::Tensor found;
    view.low = static_cast<std::int16_t*>(read_as(kByte, low, found));
    const bool has_pairs = found.ndim > 0 && found.shape[--found.ndim] == 2 &&
                           (found.strides[found.ndim] == 1 || view.numel == 0);
    if (!has_pairs || !is_alike(found, layout_, 2)) throw Refusal{"low: its shape or layout"};
  }

  /// Reads a state: a lean optimizer's codes and scales, or floats.
  Stored read_state(int s, const ParameterView& view) {
    const RuleNames::OfState& names = *group_.states[s];
    PyObject* const tensor = find(state_, names.state);
    Stored stored = group_.formats[s];
    dlpack::Tensor found;
    if (update_.is_lean && find(state_, names.codes) != nullptr) {
      if (tensor != nullptr) throw Refusal{text(names.state) + " was set beside its codes"};
      stored.data = read_as(kByte, names.codes, found);
      if (!is_alike(found, layout_)) throw Refusal{text(names.codes) + ": its shape or layout"};
      stored.scales = static_cast<float*>(read_as(kFloat32, names.scales, found));
      if (found.numel() != view.numel / view.row * Blocks::in_row(view.row))
        throw Refusal{text(names.scales) + ": its number of blocks"};
      return stored;
    }
    if (tensor == nullptr || tensor == Py_None) throw kNoState;
    const bool is_random = stored.is_random;
    if (!read_floats(tensor, found, stored))
      throw Refusal{text(names.state) + ": its dtype, layout or device"};
    stored.is_random = is_random && stored.format == Format::kBFloat16;
    return stored;
  }

  /// Reads the count of steps, which torch keeps on the host unless the group is fused or
  /// capturable. On a device that is apart, Python moves it there.
  float* read_count() {
    static PyObject* const name = intern("step");
    PyObject* const tensor = find(state_, name);
    if (tensor == nullptr) throw kNoState;
    dlpack::Tensor found;
    const auto is_on = [&](dlpack::Device device) {
      return read(tensor, device, found) && found.dtype == kFloat32 && found.numel() == 1;
    };
    if (is_on(backend_.device)) return static_cast<float*>(found.data);
    if (backend_.is_apart && !group_.counts_on_device && is_on(kHost)) throw kNoState;
    throw Refusal{"step: its dtype, layout or device"};
  }

  /// Reads a tensor of the state, of another dtype than floats of a parameter's shape.
  void* read_as(dlpack::DataType dtype, PyObject* name, dlpack::Tensor& found) {
    PyObject* const tensor = find(state_, name);
    if (tensor == nullptr) throw kNoState;
    if (!read(tensor, backend_.device, found) || !(found.dtype == dtype))
      throw Refusal{text(name) + ": its dtype, layout or device"};
    return found.data;
  }

  /// Reads floats that have the parameter's shape and order of memory, `layout_`.
  bool read_floats(py::handle tensor, dlpack::Tensor& found, Stored& stored) {
    if (!read(tensor, backend_.device, found) || !is_alike(found, layout_)) return false;
    const auto format = format_of(found.dtype);
    if (!format) return false;
    stored = {found.data, nullptr, *format, false};
    return true;
  }

  bool read(py::handle tensor, dlpack::Device device, dlpack::Tensor& found) {
    if (!read_dense(tensor, device, found)) return false;
    update_.prefetcher.add(tensor, found);
    step_.alive.push_back(py::reinterpret_borrow<py::object>(tensor));
    ranges_.add(found.data, found.numel() * found.dtype.bits / 8);
    return true;
  }

  const Backend& backend_;
  Update& update_;
  PyObject* states_;
  Py_ssize_t place_ = 0;  // in `states_`
  ReadStep& step_;
  py::list grads_{step_.tensors};
  Ranges& ranges_;
  Group group_{};
  PyObject* state_ = nullptr;  // of the parameter
  dlpack::Tensor layout_{};    // the parameter's
};

/// Reads optimizers, each an update, groups and states; leaves those out that have no gradient.
/// Throws a Refusal if none has one. `grads` are those of all parameters, in order, or None: each
/// parameter's own.
std::vector<ReadStep> read_steps(const Backend& backend, const py::list& steps,
                                 const py::object& grads) {
  std::vector<ReadStep> read;
  Ranges* ranges = nullptr;
  for (const py::handle each : steps) {
    const auto given = py::reinterpret_borrow<py::tuple>(each);
    auto& update = given[0].cast<Update&>();
    if (ranges == nullptr) {
      ranges = &update.ranges;
      ranges->clear();
    }
    update.prefetcher.begin();
    ReadStep step;
    step.tensors = py::list();
    step.owns_grads = grads.is_none();
    step.list.rule = update.names.rule->rule;
    PyObject* const states = PyTuple_GET_ITEM(given.ptr(), 2);
    if (!PyDict_Check(states)) throw Refusal{"the optimizer's state is not a dict"};
    Reader reader(backend, update, states, step, *ranges);
    PyObject* const groups = as_list(PyTuple_GET_ITEM(given.ptr(), 1), "param_groups");
    Py_ssize_t place = 0;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(groups); ++i)
      reader.add_group(PySequence_Fast_GET_ITEM(groups, i), grads, place);
    if (!step.params.empty()) read.push_back(std::move(step));
  }
  if (read.empty()) throw kNoGradient;
  if (ranges->overlap()) throw Refusal{"tensors share their memory"};
  return read;
}

/// Updates, and increments the versions of the tensors that are written, as far as the host knows.
void apply(const Backend& backend, ReadStep& step, const UpdateSpec& spec) {
  const Launch launch = backend.launch();
  {
    const py::gil_scoped_release no_gil;
    backend.ops.update(step.list, spec, launch);
  }
  py::list written = std::move(step.params);
  if (!spec.write_grads && step.owns_grads)
    for (const py::handle param : written) drop_grad(param);
  const bool is_known = !backend.is_apart;
  if (!is_known || spec.found_inf == nullptr || *spec.found_inf == 0) {
    if (spec.write_grads && spec.factor != nullptr && !(is_known && *spec.factor == 1))
      for (const py::handle grad : step.tensors) written.append(grad);
    increment_versions(written);
  }
}

py::object read_step(const Backend& backend, const py::object& update, const py::object& groups,
                     const py::object& states, const py::object& grads) {
  try {
    py::list steps;
    steps.append(py::make_tuple(update, groups, states));
    return py::cast(std::move(read_steps(backend, steps, grads).front()));
  } catch (const Refusal& refusal) {
    return py::make_tuple(refusal.kind, refusal.reason);
  }
}

void apply_step(const Backend& backend, ReadStep& step, const py::object& factor,
                const py::object& found_inf, bool zero_grad) {
  const UpdateSpec spec{backend.optional_float(factor, "factor"),
                        backend.optional_float(found_inf, "found_inf"), !zero_grad, true};
  apply(backend, step, spec);
}

/// Reads optimizers, measures all their gradients at once, and updates. Where it does not measure,
/// `before` alone says whether the step is skipped.
py::object make_step(const Backend& backend, const py::list& steps, bool measures,
                     const py::object& scale, const py::object& max_norm, const py::object& before,
                     const py::object& skipped, bool zero_grad) {
  const ClipSpec clip = clip_of(backend, scale, max_norm, true, before, skipped);
  try {
    std::vector<ReadStep> read = read_steps(backend, steps, py::none());
    ReadStep& first = read.front();
    const bool is_one = read.size() == 1;
    UpdateSpec spec{nullptr, clip.before, !zero_grad, !measures || !is_one};
    py::object stats = py::none();
    if (measures) {
      TensorList all;
      for (const ReadStep& step : read)
        if (!is_one) all.insert(all.end(), step.views.begin(), step.views.end());
      const Measured measured =
          measure(backend, is_one ? first.views : all, clip, false, is_one ? &first.list : nullptr);
      spec.factor = &measured.values->factor;
      spec.found_inf = &measured.values->found_inf;
      stats = measured.stats;
    }
    for (ReadStep& step : read) apply(backend, step, spec);
    return stats;
  } catch (const Refusal& refusal) {
    return py::make_tuple(refusal.kind, refusal.reason);
  }
}

/// The declarations, for Python: {name: (states with the options that they depend on, `counts`,
/// `as_grad`, options)}.
py::dict declarations() {
  py::dict found;
  for (const Declaration& rule : kDeclarations) {
    py::list states;
    for (const State& state : rule.states)
      if (state.name != nullptr)
        states.append(py::make_tuple(state.name, state.option == nullptr ? "" : state.option));
    py::list options;
    for (const Option& each : rule.options)
      if (each.name != nullptr) options.append(each.name);
    found[rule.name] = py::make_tuple(py::tuple(states), rule.counts, rule.as_grad, options);
  }
  return found;
}

}  // namespace

void define_update(py::module_& module, py::class_<Backend>& backend) {
  py::class_<ReadStep, PackedTensors>(module, "ReadStep");
  py::class_<Update>(module, "Update")
      .def(py::init<const std::string&, bool>(), py::arg("rule"), py::arg("is_lean") = false);
  backend
      .def("read", &read_step, py::arg("update"), py::arg("groups"), py::arg("states"),
           py::arg("grads"))
      .def("apply", &apply_step, py::arg("step"), py::arg("factor"), py::arg("found_inf"),
           py::arg("zero_grad"))
      .def("step", &make_step, py::arg("steps"), py::arg("measures"), py::arg("scale"),
           py::arg("max_norm"), py::arg("before"), py::arg("skipped"), py::arg("zero_grad"));
  module.attr("rules") = declarations();
}

}  // namespace fastamp
