// A whole step in one call. The optimizer's options, parameters, gradients and states are read anew
// each time, so that nothing can be stale.
#include <pybind11/stl.h>

#include <utility>
#include <variant>

#include "step/bind_options.h"
#include "step/formats.h"

namespace fastamp {
namespace {

const Declaration& find_rule(const std::string& name) {
  for (const Declaration& rule : kDeclarations)
    if (name == rule.name) return rule;
  throw py::value_error("rule: " + name + " is not declared in step/rules.h");
}

/// Finds the states of parameters. The optimizer's dict mostly has them in the parameters' order,
/// and a look at the next entry takes a tenth of the time that torch's hash of a tensor does.
class StateReader {
 public:
  explicit StateReader(PyObject* states) : states_(states) {}

  PyObject* operator[](PyObject* param) {
    Py_ssize_t next = place_;
    PyObject* name = nullptr;
    PyObject* state = nullptr;
    if (PyDict_Next(states_, &next, &name, &state) && name == param)
      place_ = next;
    else
      state = find(states_, param);
    return state;
  }

 private:
  PyObject* states_;
  Py_ssize_t place_ = 0;
};

/// Prefetches memory in the order in which the last step read it. With thousands of tensors, the
/// read mostly waits for memory, since the update in between has filled the caches; the caches hold
/// a few, where prefetching would cost a tenth. Prefetching a stale address does no harm.
class Prefetcher {
 public:
  void begin(std::size_t count) {
    is_worth_it_ = count >= kMany;
    last_.swap(now_);
    now_.clear();
    next_ = 0;
    while (next_ < kLines && next_ < last_.size()) fetch();
  }
  void met(const void* address) {
    if (!is_worth_it_) return;
    now_.push_back(address);
    if (next_ < last_.size()) fetch();
  }
  /// torch keeps a tensor's sizes beside its other fields.
  void met(py::handle tensor, const Strides& layout) {
    if (!is_worth_it_) return;
    met(tensor.ptr());
    const char* sizes = reinterpret_cast<const char*>(layout.shape);
    for (const int offset : {-2, -1, 0, 1}) met(sizes + offset * kLineBytes);
  }

 private:
  static constexpr std::size_t kMany = 100;
  static constexpr int kLineBytes = 64;
  static constexpr std::size_t kLines = 128;  // about five parameters

  void fetch() { __builtin_prefetch(last_[next_++]); }

  std::vector<const void*> last_;
  std::vector<const void*> now_;
  std::size_t next_ = 0;
  bool is_worth_it_ = false;
};

/// What a step keeps for the next one of the same optimizer: memory, so that it allocates nothing.
struct Spare {
  UpdateList list;
  std::vector<py::object> states;
  Prefetcher prefetcher;
  Ranges ranges;
};

/// Reads the states of one parameter, and keeps them alive.
struct StatesOf {
  const Backend& backend;
  const Group& group;
  PyObject* state;
  const Strides& layout;  ///< the parameter's
  Spare& spare;
  std::vector<py::object>& alive;

  /// Reads how a lean optimizer keeps the parameter.
  void read_weights(ParameterView& view) {
    static PyObject* const low = PyUnicode_InternFromString("low");
    if (view.param.format == Format::kFloat16) throw Refusal{"a parameter is float16"};
    std::int64_t row = 1;
    for (int dim = 1; dim < layout.ndim; ++dim) row *= layout.shape[dim];
    if (row >= std::int64_t{1} << 31) throw Refusal{"a parameter's row has 2^31 elements"};
    view.row = static_cast<std::uint32_t>(std::max<std::int64_t>(row, 1));
    view.seed = group.seed;
    if (view.param.format != Format::kBFloat16) return;
    view.param.is_random = !group.is_exact;
    if (group.is_exact) {
      Strides other;
      view.low = static_cast<std::int16_t*>(bytes_of(low, kByte, other));
      if (!has_pairs(other)) throw Refusal{"low: its shape or layout"};
    } else if (find(state, low) != nullptr) {
      throw Refusal{"low: exact was changed"};
    }
  }

  /// Reads a state: a lean optimizer's codes and scales, or floats.
  Stored read(int s, const ParameterView& view, bool is_lean) {
    const StateNames& names = group.states[s];
    PyObject* const tensor = find(state, names.state);
    Strides other;
    if (is_lean && find(state, names.codes) != nullptr) {
      if (tensor != nullptr) throw Refusal{text(names.state) + " was set beside its codes"};
      Stored found = group.formats[s];
      found.data = bytes_of(names.codes, kByte, other);
      if (!is_alike(other, layout)) throw Refusal{text(names.codes) + ": its shape or layout"};
      found.scales = static_cast<float*>(bytes_of(names.scales, kFloat32, other));
      if (other.numel() != view.numel / view.row * Blocks::in_row(view.row))
        throw Refusal{text(names.scales) + ": its number of blocks"};
      return found;
    }
    if (tensor == nullptr || tensor == Py_None) throw kNoState;
    const auto found = read_dense(tensor, backend.device, &other);
    if (!found || !is_alike(other, layout))
      throw Refusal{text(names.state) + ": its dtype, layout or device"};
    spare.prefetcher.met(tensor, other);
    add(tensor, found->data, found->numel * size_of(found->format));
    const bool is_random =
        is_lean && found->format == Format::kBFloat16 && group.formats[s].is_random;
    return {found->data, nullptr, found->format, is_random};
  }

 private:
  /// Whether a tensor has two neighboring bytes for each element of the parameter, in its order.
  bool has_pairs(const Strides& found) const {
    if (found.ndim != layout.ndim + 1 || found.shape[layout.ndim] != 2) return false;
    for (int dim = 0; dim < layout.ndim; ++dim)
      if (found.shape[dim] != layout.shape[dim] ||
          (found.shape[dim] > 1 && found.strides[dim] != 2 * layout.strides[dim]))
        return false;
    return found.strides[layout.ndim] == 1 || found.numel() == 0;
  }

  void* bytes_of(PyObject* name, dlpack::DataType dtype, Strides& found) {
    PyObject* const tensor = find(state, name);
    if (tensor == nullptr) throw kNoState;
    const auto data = read_dense_of(tensor, dtype, backend.device, &found);
    if (!data) throw Refusal{text(name) + ": its dtype, layout or device"};
    add(tensor, *data, found.numel() * dtype.bits / 8);
    return *data;
  }

  void add(PyObject* tensor, const void* data, std::int64_t nbytes) {
    spare.ranges.add(data, static_cast<std::size_t>(nbytes));
    alive.push_back(py::reinterpret_borrow<py::object>(tensor));
  }
};

/// One optimizer's gradients, parameters and states, read for one step.
struct ReadStep : PackedTensors {
  py::list params;  ///< those that have a gradient
  bool owns_grads;  ///< whether the gradients are the parameters' `.grad`
  UpdateList list;
  std::vector<py::object> states;  ///< kept alive: another thread may replace them in their dict
};

/// The steps of one optimizer. What it holds between them is taken out by a step and given back at
/// its end: several threads may step one optimizer.
class Update {
 public:
  Update(const std::string& rule, bool is_lean) : rule_(find_rule(rule)), is_lean_(is_lean) {}

  /// Reads the optimizer, or throws a Refusal. `grads` are those of all parameters, in order, or
  /// None: each parameter's own.
  ReadStep read(const Backend& backend, const py::object& groups, const py::object& states,
                const py::object& grads) {
    Spare spare = std::exchange(spare_, {});
    ReadStep step;
    step.list = std::move(spare.list);
    step.states = std::move(spare.states);
    step.list.rule = rule_.rule;
    step.list.groups.clear();
    step.list.parameters.clear();
    step.owns_grads = grads.is_none();
    spare.ranges.clear();
    read_all(backend, groups, states, grads, spare, step);
    const bool overlap = !spare.ranges.overlapping().empty();
    spare_.prefetcher = std::move(spare.prefetcher);
    spare_.ranges = std::move(spare.ranges);
    if (overlap) throw Refusal{"tensors share their memory"};
    return step;
  }

  /// Updates, and increments the versions of the tensors that are written, as far as the host
  /// knows.
  void apply(const Backend& backend, ReadStep& step, const UpdateSpec& spec) {
    const Launch launch = backend.launch();
    {
      const py::gil_scoped_release no_gil;
      backend.ops.update(step.list, spec, launch);
    }
    spare_.list = std::move(step.list);
    step.states.clear();
    spare_.states = std::move(step.states);
    py::list written = std::move(step.params);
    if (!spec.write_grads && step.owns_grads)
      for (const py::handle param : written) drop_grad(param);
    if (!backend.is_apart && spec.found_inf != nullptr && *spec.found_inf != 0) return;
    const bool scales = spec.factor != nullptr && (backend.is_apart || *spec.factor != 1);
    if (scales && spec.write_grads)
      for (const py::handle grad : step.tensors) written.append(grad);
    increment_versions(written);
  }

  /// The memory of what was read last.
  const Ranges& ranges() const { return spare_.ranges; }

 private:
  void read_all(const Backend& backend, const py::object& groups, const py::object& states,
                const py::object& grads, Spare& spare, ReadStep& step) {
    if (!PyDict_Check(states.ptr())) throw Refusal{"the optimizer's state is not a dict"};
    const py::object all = as_list(groups.ptr(), "param_groups");
    std::vector<Group> found;
    std::size_t count = 0;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all.ptr()); ++i) {
      found.push_back(read_group(rule_, is_lean_, PySequence_Fast_GET_ITEM(all.ptr(), i), backend));
      count += static_cast<std::size_t>(PySequence_Fast_GET_SIZE(found.back().params.ptr()));
    }
    py::list own_grads;
    step.tensors = own_grads;
    StateReader reader(states.ptr());
    spare.prefetcher.begin(count);
    Py_ssize_t place = 0;
    for (const Group& group : found) {
      step.list.groups.push_back(group.options);
      PyObject* const params = group.params.ptr();
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(params); ++i) {
        const py::handle param = PySequence_Fast_GET_ITEM(params, i);
        const py::object grad =
            grads.is_none()
                ? grad_of(param)
                : py::reinterpret_borrow<py::object>(PyList_GET_ITEM(grads.ptr(), place++));
        if (!grad) throw Refusal{"a parameter is of another type", "halves"};
        if (grad.is_none()) continue;
        step.params.append(param);
        own_grads.append(grad);
        add(backend, group, param, grad, reader, spare, step);
      }
    }
    if (step.params.empty()) throw kNoGradient;
  }

  void add(const Backend& backend, const Group& group, py::handle param, py::handle grad,
           StateReader& reader, Spare& spare, ReadStep& step) const {
    Prefetcher& prefetcher = spare.prefetcher;
    Strides layout;
    Strides other;
    const auto own = read_dense(param, backend.device, &layout);
    if (!own) throw Refusal{"a parameter's dtype, layout or device"};
    prefetcher.met(param, layout);
    const auto its_grad = read_dense(grad, backend.device, &other);
    if (!its_grad || !is_alike(other, layout))
      throw Refusal{"a gradient's dtype, layout or device"};
    if (its_grad->format == Format::kFloat16 && !group.is_fused)
      throw Refusal{"float16 gradients of an optimizer that is not fused"};
    prefetcher.met(grad, other);
    if (is_negated(param, own->numel) || is_negated(grad, own->numel))
      throw Refusal{"a negated view"};
    const auto take = [&](const TensorView& view) {
      spare.ranges.add(view.data, static_cast<std::size_t>(view.numel * size_of(view.format)));
      return view.data;
    };
    ParameterView view{};
    view.numel = own->numel;
    view.param = {take(*own), nullptr, own->format, false};
    view.grad = {take(*its_grad), nullptr, its_grad->format, false};
    view.row = 1;
    view.group = static_cast<std::uint32_t>(step.list.groups.size() - 1);
    step.add(*its_grad);
    PyObject* state = nullptr;
    const bool counts = rule_.counts || is_lean_;
    if (group.num_states > 0 || counts) {
      state = reader[param.ptr()];
      if (state == nullptr || !PyDict_Check(state)) throw Refusal{kNoState};
      prefetcher.met(state);
    }
    StatesOf states{backend, group, state, layout, spare, step.states};
    if (is_lean_) states.read_weights(view);
    for (int s = 0; s < group.num_states; ++s) {
      view.states[s] = states.read(s, view, is_lean_);
      if (is_coded(view.states[s].format) != view.has_codes() ||
          (!view.has_codes() && view.states[s].format != view.states[0].format))
        throw Refusal{"the states' dtypes differ"};
    }
    if (counts)
      view.step =
          static_cast<float*>(take(read_count(backend, group, state, prefetcher, step.states)));
    step.list.parameters.push_back(view);
  }

  /// Reads the count of steps, which torch keeps on the host unless the group is fused or
  /// capturable. On a device that is apart, Python moves it there.
  static TensorView read_count(const Backend& backend, const Group& group, PyObject* state,
                               Prefetcher& prefetcher, std::vector<py::object>& kept) {
    static PyObject* const name = PyUnicode_InternFromString("step");
    PyObject* tensor = find(state, name);
    if (tensor == nullptr) throw kNoState;
    const auto is_count = [](const std::optional<TensorView>& view) {
      return view && view->format == Format::kFloat32 && view->numel == 1;
    };
    Strides layout;
    const auto found = read_dense(tensor, backend.device, &layout);
    if (is_count(found)) {
      prefetcher.met(tensor, layout);
      kept.push_back(py::reinterpret_borrow<py::object>(tensor));
      return *found;
    }
    if (backend.is_apart && !group.counts_on_device && is_count(read_dense(tensor, kHost)))
      throw kNoState;
    throw Refusal{"step: its dtype, layout or device"};
  }

  const Declaration& rule_;
  bool is_lean_;
  Spare spare_;
};

py::object read_step(const Backend& backend, Update& update, const py::object& groups,
                     const py::object& states, const py::object& grads) {
  try {
    return py::cast(update.read(backend, groups, states, grads));
  } catch (const Refusal& refusal) {
    return py::make_tuple(refusal.kind, refusal.reason);
  }
}

void apply_step(const Backend& backend, Update& update, ReadStep& step, const py::object& factor,
                const py::object& found_inf, bool zero_grad) {
  const UpdateSpec spec{backend.optional_float(factor, "factor"),
                        backend.optional_float(found_inf, "found_inf"), !zero_grad, true};
  update.apply(backend, step, spec);
}

/// One optimizer of a step: its update, and what has been read.
struct Part {
  Update& update;
  ReadStep step;
};

/// Reads optimizers of one step, those that have a gradient; throws a Refusal if none has.
std::vector<Part> read_parts(const Backend& backend, const py::list& steps) {
  static thread_local Ranges ranges;
  ranges.clear();
  std::vector<Part> parts;
  for (const py::handle each : steps) {
    const auto own = py::reinterpret_borrow<py::tuple>(each);
    auto& update = own[0].cast<Update&>();
    try {
      parts.push_back({update, update.read(backend, own[1], own[2], py::none())});
    } catch (const Refusal& refusal) {
      if (refusal.kind != kNoGradient.kind) throw;
      continue;
    }
    if (steps.size() > 1) ranges.add(update.ranges());
  }
  if (parts.empty()) throw kNoGradient;
  if (!ranges.overlapping().empty()) throw Refusal{"tensors share their memory"};
  return parts;
}

/// Reads optimizers, each an update, groups and states; measures all their gradients at once unless
/// `measures` is false, and updates. Without a measure `before` alone says whether the step is
/// skipped.
py::object make_step(const Backend& backend, const py::list& steps, bool measures,
                     const py::object& scale, const py::object& max_norm, const py::object& before,
                     const py::object& skipped, bool zero_grad) {
  const ClipSpec clip = clip_of(backend, scale, max_norm, true, before, skipped);
  try {
    std::vector<Part> parts = read_parts(backend, steps);
    const bool is_one = parts.size() == 1;
    UpdateSpec spec{nullptr, clip.before, !zero_grad, !measures || !is_one};
    Measured measured{py::none(), py::none()};
    if (measures) {
      PackedTensors all;
      for (const Part& part : parts)
        if (!is_one) all.join(part.step);
      measured = measure(backend, is_one ? parts[0].step : all, clip, false,
                         is_one ? &parts[0].step.list : nullptr);
      const auto* stats = static_cast<GradStats*>(
          data_of(measured.stats, kFloat32, kNumStats, backend.device, "stats"));
      spec.factor = &stats->factor;
      spec.found_inf = &stats->found_inf;
    }
    for (Part& part : parts) part.update.apply(backend, part.step, spec);
    return measured.stats;
  } catch (const Refusal& refusal) {
    return py::make_tuple(refusal.kind, refusal.reason);
  }
}

/// The declarations, for Python: {name: (states with the options that they depend on, whether it
/// counts steps, how a state begins, options)}.
py::dict declarations() {
  py::dict found;
  for (const Declaration& rule : kDeclarations) {
    py::list states;
    for (const State& state : rule.states)
      if (state.name != nullptr)
        states.append(py::make_tuple(state.name, state.option == nullptr ? "" : state.option));
    py::list options;
    for (const Number& each : rule.numbers)
      if (each.name != nullptr) options.append(each.name);
    for (const Flag& each : rule.flags)
      if (each.name != nullptr) options.append(each.name);
    found[rule.name] = py::make_tuple(py::tuple(states), rule.counts, rule.first, options);
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
      .def("apply", &apply_step, py::arg("update"), py::arg("step"), py::arg("factor"),
           py::arg("found_inf"), py::arg("zero_grad"))
      .def("step", &make_step, py::arg("steps"), py::arg("measures"), py::arg("scale"),
           py::arg("max_norm"), py::arg("before"), py::arg("skipped"), py::arg("zero_grad"));
  module.attr("rules") = declarations();
}

}  // namespace fastamp
