// A whole step in one call. The optimizer's options, parameters, gradients and states are read anew
// each time, so that nothing can be stale.
#include <pybind11/stl.h>

#include <utility>
#include <variant>

#include "step/bind_options.h"
#include "step/formats.h"

namespace fastamp {
namespace {

/// Returned, not raised, where a state is missing or its count not yet on the device: Python makes
/// the state and asks again.
constexpr const char* kNoState = "no state";

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

/// Reads how fastamp.AdamW keeps a parameter: its lower half, and the moments' codes and scales.
struct KeptReader {
  const Backend& backend;
  const Group& group;
  PyObject* state;
  const Strides& layout;  ///< the parameter's
  Ranges& ranges;
  std::vector<py::object>& alive;
  bool has_codes = false;

  Kept read(ParameterView& view) {
    static PyObject* const low = PyUnicode_InternFromString("low");
    static PyObject* const scales[] = {PyUnicode_InternFromString("exp_avg_scale"),
                                       PyUnicode_InternFromString("exp_avg_sq_scale")};
    static PyObject* const codes[] = {PyUnicode_InternFromString("exp_avg_codes"),
                                      PyUnicode_InternFromString("exp_avg_sq_codes")};
    static PyObject* const moments[] = {PyUnicode_InternFromString("exp_avg"),
                                        PyUnicode_InternFromString("exp_avg_sq")};
    if (view.param_dtype == DType::kFloat16) throw Refusal{"a parameter is float16"};
    Kept kept{nullptr, {}, std::max<std::int64_t>(view.numel, 1), group.seed};
    Strides other;
    if (view.param_dtype == DType::kBFloat16) {
      if (group.is_exact) {
        kept.low = static_cast<std::int16_t*>(read(low, kByte, other));
        if (!has_pairs(other)) throw Refusal{"low: its shape or layout"};
      } else if (find(state, low) != nullptr) {
        throw Refusal{"low: exact was changed"};
      }
    }
    has_codes = find(state, scales[0]) != nullptr;
    for (int s = 0; s < 2 && has_codes; ++s)
      if (find(state, moments[s]) != nullptr) throw Refusal{"a moment was set beside its codes"};
    if (!has_codes || view.numel == 0) return kept;
    kept.row = 1;
    for (int dim = 1; dim < layout.ndim; ++dim) kept.row *= layout.shape[dim];
    for (int s = 0; s < 2; ++s) {
      view.states[s] = read(codes[s], kByte, other);
      if (!is_alike(other, layout)) throw Refusal{text(codes[s]) + ": its shape or layout"};
      kept.scales[s] = static_cast<float*>(read(scales[s], kFloat32, other));
      if (other.numel() != Blocks(kept.row).count(view.numel))
        throw Refusal{text(scales[s]) + ": its number of blocks"};
    }
    return kept;
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

  void* read(PyObject* name, dlpack::DataType dtype, Strides& found) {
    PyObject* tensor = find(state, name);
    if (tensor == nullptr) throw Refusal{kNoState};
    const auto data = read_dense_of(tensor, dtype, backend.device, &found);
    if (!data) throw Refusal{text(name) + ": its dtype, layout or device"};
    ranges.add(*data, static_cast<std::size_t>(found.numel() * dtype.bits / 8));
    alive.push_back(py::reinterpret_borrow<py::object>(tensor));
    return *data;
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
  explicit Update(const std::string& rule) : rule_(find_rule(rule)) {}

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
    step.list.kept.clear();
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

 private:
  void read_all(const Backend& backend, const py::object& groups, const py::object& states,
                const py::object& grads, Spare& spare, ReadStep& step) {
    if (!PyDict_Check(states.ptr())) throw Refusal{"the optimizer's state is not a dict"};
    const py::object all = as_list(groups.ptr(), "param_groups");
    std::vector<Group> found;
    std::size_t count = 0;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all.ptr()); ++i) {
      found.push_back(read_group(rule_, PySequence_Fast_GET_ITEM(all.ptr(), i), backend));
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
        if (!grad) throw Refusal{"a parameter is of another type"};
        if (grad.is_none()) continue;
        step.params.append(param);
        own_grads.append(grad);
        add(backend, group, param, grad, reader, spare, step);
      }
    }
    if (step.params.empty()) throw Refusal{"no parameter has a gradient"};
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
    if (its_grad->dtype == DType::kFloat16 && !group.is_fused)
      throw Refusal{"float16 gradients of an optimizer that is not fused"};
    prefetcher.met(grad, other);
    if (is_negated(param, own->numel) || is_negated(grad, own->numel))
      throw Refusal{"a negated view"};
    const auto take = [&](const TensorView& view) {
      spare.ranges.add(view.data, static_cast<std::size_t>(view.numel * size_of(view.dtype)));
      return view.data;
    };
    ParameterView view{};
    view.numel = own->numel;
    view.param = take(*own);
    view.grad = take(*its_grad);
    view.group = static_cast<std::uint32_t>(step.list.groups.size() - 1);
    view.param_dtype = own->dtype;
    view.grad_dtype = its_grad->dtype;
    step.add(*its_grad);
    PyObject* state = nullptr;
    if (group.num_states > 0 || rule_.counts) {
      state = reader[param.ptr()];
      if (state == nullptr || !PyDict_Check(state)) throw Refusal{kNoState};
      prefetcher.met(state);
    }
    bool has_codes = false;
    if (rule_.is_kept) {
      KeptReader reader{backend, group, state, layout, spare.ranges, step.states};
      step.list.kept.push_back(reader.read(view));
      has_codes = reader.has_codes;
    }
    for (int s = 0; s < (has_codes ? 0 : group.num_states); ++s) {
      PyObject* tensor = find(state, group.states[s]);
      if (tensor == nullptr || tensor == Py_None) throw Refusal{kNoState};
      const auto found = read_dense(tensor, backend.device, &other);
      if (!found || !is_alike(other, layout))
        throw Refusal{text(group.states[s]) + ": its dtype, layout or device"};
      if (s > 0 && found->dtype != view.state_dtype) throw Refusal{"the states' dtypes differ"};
      prefetcher.met(tensor, other);
      view.state_dtype = found->dtype;
      view.states[s] = take(*found);
      step.states.push_back(py::reinterpret_borrow<py::object>(tensor));
    }
    if (rule_.counts)
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
    if (tensor == nullptr) throw Refusal{kNoState};
    const auto is_count = [](const std::optional<TensorView>& view) {
      return view && view->dtype == DType::kFloat32 && view->numel == 1;
    };
    Strides layout;
    const auto found = read_dense(tensor, backend.device, &layout);
    if (is_count(found)) {
      prefetcher.met(tensor, layout);
      kept.push_back(py::reinterpret_borrow<py::object>(tensor));
      return *found;
    }
    if (backend.is_apart && !group.counts_on_device && is_count(read_dense(tensor, kHost)))
      throw Refusal{kNoState};
    throw Refusal{"step: its dtype, layout or device"};
  }

  const Declaration& rule_;
  Spare spare_;
};

py::object read_step(const Backend& backend, Update& update, const py::object& groups,
                     const py::object& states, const py::object& grads) {
  try {
    return py::cast(update.read(backend, groups, states, grads));
  } catch (const Refusal& refusal) {
    return py::str(refusal.reason);
  }
}

void apply_step(const Backend& backend, Update& update, ReadStep& step, const py::object& factor,
                const py::object& found_inf, bool zero_grad) {
  const UpdateSpec spec{backend.optional_float(factor, "factor"),
                        backend.optional_float(found_inf, "found_inf"), !zero_grad, true};
  update.apply(backend, step, spec);
}

/// Reads, measures unless `measures` is false, and updates. Without a measure `before` alone says
/// whether the step is skipped.
py::object make_step(const Backend& backend, Update& update, const py::object& groups,
                     const py::object& states, bool measures, const py::object& scale,
                     const py::object& max_norm, const py::object& before,
                     const py::object& skipped, bool zero_grad) {
  const ClipSpec clip = clip_of(backend, scale, max_norm, true, before, skipped);
  try {
    ReadStep found = update.read(backend, groups, states, py::none());
    UpdateSpec spec{nullptr, clip.before, !zero_grad, !measures};
    Measured measured{py::none(), py::none()};
    if (measures) {
      measured = measure(backend, found, clip, false, &found.list);
      const auto* stats = static_cast<GradStats*>(
          data_of(measured.stats, kFloat32, kNumStats, backend.device, "stats"));
      spec.factor = &stats->factor;
      spec.found_inf = &stats->found_inf;
    }
    update.apply(backend, found, spec);
    return measured.stats;
  } catch (const Refusal& refusal) {
    return py::str(refusal.reason);
  }
}

/// The declarations, for Python: {name: (states with the options that they depend on, whether it
/// counts steps, how a state begins)}.
py::dict declarations() {
  py::dict found;
  for (const Declaration& rule : kDeclarations) {
    py::list states;
    for (const State& state : rule.states)
      if (state.name != nullptr)
        states.append(py::make_tuple(state.name, state.option == nullptr ? "" : state.option));
    found[rule.name] = py::make_tuple(py::tuple(states), rule.counts, rule.first);
  }
  return found;
}

}  // namespace

void define_update(py::module_& module, py::class_<Backend>& backend) {
  py::class_<ReadStep, PackedTensors>(module, "ReadStep");
  py::class_<Update>(module, "Update").def(py::init<const std::string&>(), py::arg("rule"));
  backend
      .def("read", &read_step, py::arg("update"), py::arg("groups"), py::arg("states"),
           py::arg("grads"))
      .def("apply", &apply_step, py::arg("update"), py::arg("step"), py::arg("factor"),
           py::arg("found_inf"), py::arg("zero_grad"))
      .def("step", &make_step, py::arg("update"), py::arg("groups"), py::arg("states"),
           py::arg("measures"), py::arg("scale"), py::arg("max_norm"), py::arg("before"),
           py::arg("skipped"), py::arg("zero_grad"));
  module.attr("NO_STATE") = kNoState;
  module.attr("rules") = declarations();
}

}  // namespace fastamp
