// An optimizer as a step needs it: its options, parameters, gradients and states are read anew each
// time, so that nothing can be stale.
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <variant>

#include "step/bind_counts.h"
#include "step/bind_options.h"

namespace fastamp {
namespace {

constexpr const char* kNoState = "no state";

std::size_t count_params(const py::list& groups) {
  std::size_t count = 0;
  for (const py::handle group : groups)
    count += static_cast<std::size_t>(PyList_GET_SIZE(params_of(group.ptr())));
  return count;
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
    if (state == nullptr || !PyDict_Check(state)) throw Refusal{kNoState};
    return state;
  }

 private:
  PyObject* states_;
  Py_ssize_t place_ = 0;
};

/// Prefetches memory in the order in which the last step read it. With thousands of tensors, the
/// read mostly waits for memory, since the update in between has filled the caches; the caches hold
/// a few, where prefetching would cost a tenth. Prefetching a stale address does no harm.
class Ahead {
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
  void met(const Layout& layout) {
    if (!is_worth_it_) return;
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

/// One step's gradients, parameters and states. It belongs to the step, not to the optimizer, which
/// several threads may step at once.
struct ReadStep : PackedTensors {
  py::list params;  ///< those that have a gradient
  UpdateList list;
  HostCounts::Taken counts;
};

/// One optimizer's update: `read` collects its tensors, `apply` updates them.
class Update {
 public:
  Update(Rule rule, bool decoupled, std::optional<int> cuda_device, bool host_is_apart)
      : rule_(rule),
        decoupled_(decoupled),
        cuda_device_(cuda_device),
        host_is_apart_(host_is_apart) {}

  std::variant<ReadStep, std::string> read(const py::list& groups, const py::dict& states) {
    try {
      return read_all(groups, states);
    } catch (const Refusal& refusal) {
      return refusal.reason;
    }
  }

  /// Updates. Returns the tensors that are written, as far as the host knows.
  py::list apply(const OpTable& ops, ReadStep& step, const UpdateSpec& spec,
                 const py::object& slots, int num_threads) {
    if (!step.counts.empty()) {
      const auto size = static_cast<std::int64_t>(counts_.size());
      auto* const memory = static_cast<float*>(data_of(slots, kFloat32, size, "slots"));
      counts_.attach(step.list, step.counts, memory);
    }
    const Launch launch = launch_on(cuda_device_, num_threads);
    {
      const py::gil_scoped_release no_gil;
      ops.update(step.list, spec, launch);
    }
    counts_.advance(step.counts);
    spare_ = std::move(step.list);
    py::list params = std::move(step.params);
    if (!spec.write_grads)
      for (const py::handle param : params) drop_grad(param);
    if (!host_is_apart_ && spec.found_inf != nullptr && *spec.found_inf != 0) return py::list();
    const bool scales = spec.factor != nullptr && (host_is_apart_ || *spec.factor != 1);
    if (scales && spec.write_grads)
      for (const py::handle grad : step.tensors) params.append(grad);
    return params;
  }

  HostCounts& counts() { return counts_; }

 private:
  ReadStep read_all(const py::list& groups, const py::dict& states) {
    counts_.begin();
    const dlpack::Device device = device_of(cuda_device_);
    ReadStep step;
    py::list grads;
    step.cuda_device = cuda_device_;
    step.tensors = grads;
    step.list = std::move(spare_);
    step.list.rule = rule_;
    step.list.groups.clear();
    step.list.parameters.clear();
    StateReader reader(states.ptr());
    const std::size_t count = count_params(groups);
    ahead_.begin(count);
    AddressSet seen(2 * count);
    for (const py::handle group : groups) {
      const auto apart = host_is_apart_ ? std::optional{device} : std::nullopt;
      step.list.groups.push_back(read_options(rule_, decoupled_, group.ptr(), apart));
      // torch keeps the counts of an optimizer that is not fused on the host.
      host_counts_ = host_is_apart_ && !is_true(group.ptr(), keys().fused);
      PyObject* params = params_of(group.ptr());
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); ++i) {
        const py::handle param = PyList_GET_ITEM(params, i);
        const py::object grad = grad_of(param);
        if (!grad) throw Refusal{"a parameter is of another type"};
        if (grad.is_none()) continue;
        step.params.append(param);
        grads.append(grad);
        add(param, grad, reader, device, seen, step);
      }
    }
    if (step.params.empty()) throw Refusal{"no parameter has a gradient"};
    return step;
  }

  void add(py::handle param, py::handle grad, StateReader& reader, dlpack::Device device,
           AddressSet& seen, ReadStep& step) {
    const GroupOptions& group = step.list.groups.back();
    Layout layout;
    Layout other;
    const auto own = read_dense(param, device, &layout);
    if (!own) throw Refusal{"a parameter's dtype, layout or device"};
    meet(param, layout);
    const auto its_grad = read_dense(grad, device, &other);
    if (!its_grad || !is_alike(other, layout))
      throw Refusal{"a gradient's dtype, layout or device"};
    meet(grad, other);
    if (is_negated(param, own->numel) || is_negated(grad, own->numel))
      throw Refusal{"a negated view"};
    if (own->numel > 0 && !(seen.insert(own->data) && seen.insert(its_grad->data)))
      throw Refusal{"tensors share their memory"};
    ParameterView view{};
    view.numel = own->numel;
    view.param = own->data;
    view.grad = its_grad->data;
    view.group = static_cast<std::uint32_t>(step.list.groups.size() - 1);
    view.param_dtype = own->dtype;
    view.grad_dtype = its_grad->dtype;
    add_view(step, *its_grad);
    const Keys& k = keys();
    int count = 0;
    const auto add_state = [&](PyObject* state, PyObject* name) {
      PyObject* tensor = find(state, name);
      if (tensor == nullptr || tensor == Py_None) throw Refusal{kNoState};
      const auto found = read_dense(tensor, device, &other);
      if (!found || !is_alike(other, layout))
        throw Refusal{text(name) + ": its dtype, layout or device"};
      if (count > 0 && found->dtype != view.state_dtype) throw Refusal{"the states' dtypes differ"};
      meet(tensor, other);
      view.state_dtype = found->dtype;
      view.states[count++] = found->data;
    };
    const auto add_step = [&](PyObject* state) {
      PyObject* tensor = find(state, k.step);
      if (tensor == nullptr) throw Refusal{kNoState};
      const auto on_host = host_counts_ ? read_dense(tensor, kHost, &other) : std::nullopt;
      const auto found = on_host ? on_host : read_dense(tensor, device, &other);
      if (!found || found->dtype != DType::kFloat32 || found->numel != 1)
        throw Refusal{"step: its dtype, layout or device"};
      meet(tensor, other);
      auto* const place = static_cast<float*>(found->data);
      if (on_host)
        counts_.add(param, place, step.list.parameters.size(), view, step.counts);
      else
        view.step = place;
    };
    const auto state_of_param = [&] {
      PyObject* state = reader[param.ptr()];
      ahead_.met(state);
      return state;
    };
    switch (rule_) {
      case Rule::kAdam: {
        PyObject* state = state_of_param();
        add_state(state, k.exp_avg);
        add_state(state, k.exp_avg_sq);
        if (group.amsgrad) add_state(state, k.max_exp_avg_sq);
        add_step(state);
        break;
      }
      case Rule::kSgd:
        if (group.momentum != 0) add_state(state_of_param(), k.momentum_buffer);
        break;
      case Rule::kAdagrad: {
        PyObject* state = state_of_param();
        add_state(state, k.sum);
        add_step(state);
      }
    }
    step.list.parameters.push_back(view);
  }

  void meet(py::handle tensor, const Layout& layout) {
    ahead_.met(tensor.ptr());
    ahead_.met(layout);
  }

  UpdateList spare_;  // of the last step, so that the next one allocates nothing
  HostCounts counts_;
  Ahead ahead_;
  Rule rule_;
  bool decoupled_;
  std::optional<int> cuda_device_;
  bool host_is_apart_;
  bool host_counts_ = false;  // of the group that is being read
};

}  // namespace

void define_update(py::module_& module, py::class_<OpTable>& ops) {
  py::enum_<Rule>(module, "Rule")
      .value("ADAM", Rule::kAdam)
      .value("SGD", Rule::kSgd)
      .value("ADAGRAD", Rule::kAdagrad);
  py::class_<ReadStep, PackedTensors>(module, "ReadStep");
  py::class_<Update>(module, "Update")
      .def(py::init<Rule, bool, std::optional<int>, bool>(), py::arg("rule"), py::arg("decoupled"),
           py::arg("cuda_device"), py::arg("host_is_apart"))
      .def("read", &Update::read, py::arg("groups"), py::arg("states"))
      .def_property_readonly("num_slots", [](Update& update) { return update.counts().size(); })
      .def(
          "settle",
          [](Update& update, const std::vector<float>& slots, const py::dict& states) {
            update.counts().settle(slots, states, keys().step);
          },
          py::arg("slots"), py::arg("states"));
  ops.def(
      "update",
      [](const OpTable& table, Update& update, ReadStep& step, const py::object& stats,
         const py::object& factor, const py::object& found_inf, bool zero_grad,
         const py::object& slots, int num_threads) {
        UpdateSpec spec{optional_float(factor, "factor"), optional_float(found_inf, "found_inf"),
                        !zero_grad};
        if (!stats.is_none()) {
          const auto* whole = static_cast<GradStats*>(data_of(stats, kFloat32, kNumStats, "stats"));
          spec.factor = &whole->factor;
          spec.found_inf = &whole->found_inf;
        }
        return update.apply(table, step, spec, slots, num_threads);
      },
      py::arg("update"), py::arg("step"), py::arg("stats"), py::arg("factor"), py::arg("found_inf"),
      py::arg("zero_grad"), py::arg("slots"), py::arg("num_threads"));
}

}  // namespace fastamp
