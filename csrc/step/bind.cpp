// The step, as Python sees it: tensors are read, the GIL is dropped, the op table does the rest.
#include "step/bind.h"

#include <pybind11/stl.h>

#include <optional>

namespace fastamp {
namespace {

PackedTensors pack(const Backend& backend, const py::object& tensors) {
  PackedTensors packed;
  packed.tensors = py::reinterpret_steal<py::tuple>(PySequence_Tuple(tensors.ptr()));
  if (!packed.tensors) throw py::error_already_set();
  static thread_local Ranges ranges;
  ranges.clear();
  const auto count = static_cast<std::int64_t>(py::len(packed.tensors));
  for (std::int64_t i = 0; i < count; ++i) {
    const py::handle tensor = PyTuple_GET_ITEM(packed.tensors.ptr(), i);
    dlpack::Tensor read{};
    const bool is_dense = read_dense(tensor, backend.device, read);
    const auto format = is_dense ? format_of(read.dtype) : std::nullopt;
    if (!format) {
      packed.rest.push_back(i);
      continue;
    }
    packed.views.push_back({read.data, read.numel(), *format});
    ranges.add(read.data, read.numel() * size_of(*format));
  }
  if (ranges.overlap()) {
    packed.views.clear();
    packed.rest.resize(static_cast<std::size_t>(count));
    std::iota(packed.rest.begin(), packed.rest.end(), 0);
  }
  return packed;
}

py::object grad_stats(const Backend& backend, const PackedTensors& tensors, const py::object& scale,
                      const py::object& max_norm, bool only_finite, const py::object& before,
                      const py::object& skipped) {
  const ClipSpec clip = clip_of(backend, scale, max_norm, only_finite, before, skipped);
  return measure(backend, tensors.views, clip, false).stats;
}

py::tuple reduce(const Backend& backend, const PackedTensors& tensors) {
  const Measured found = measure(backend, tensors.views, ClipSpec{}, true);
  return py::make_tuple(found.work, found.stats);
}

void rescale(const Backend& backend, const PackedTensors& tensors, const py::object& factor) {
  const float* value = backend.optional_float(factor, "factor");
  increment_versions(tensors.tensors);
  const Launch launch = backend.launch();
  const py::gil_scoped_release no_gil;
  backend.ops.rescale(tensors.views, value, launch);
}

/// The table of another library: that of the CUDA kernels, emulated for tests.
OpTable table_at(std::uintptr_t address, std::size_t size) {
  if (size != sizeof(OpTable))
    throw py::value_error("size: the table was compiled from other sources than this module");
  return *reinterpret_cast<const OpTable*>(address);
}

}  // namespace

Measured measure(const Backend& backend, const TensorList& views, const ClipSpec& clip,
                 bool keeps_sum, const UpdateList* counted) {
  constexpr std::int64_t kNumStats = sizeof(GradStats) / sizeof(float);
  std::int64_t size = 1;
  for (const TensorView& view : views) size += chunks_of(view.numel);
  Measured found{new_tensor(kNumStats, kFloat32, backend.torch_device), py::none(), nullptr};
  found.values =
      static_cast<GradStats*>(data_of(found.stats, kFloat32, kNumStats, backend.device, "stats"));
  std::vector<double> on_host;
  double* work = nullptr;
  if (keeps_sum || backend.is_apart) {
    found.work = new_tensor(size, kFloat64, backend.torch_device);
    work = static_cast<double*>(data_of(found.work, kFloat64, size, backend.device, "work"));
  } else {
    on_host.resize(static_cast<std::size_t>(size));
    work = on_host.data();
  }
  const Launch launch = backend.launch();
  const py::gil_scoped_release no_gil;
  backend.ops.grad_stats(views, clip, work, found.values, counted, launch);
  return found;
}

ClipSpec clip_of(const Backend& backend, const py::object& scale, const py::object& max_norm,
                 bool only_finite, const py::object& before, const py::object& skipped) {
  return {backend.optional_float(scale, "scale"),
          !max_norm.is_none(),
          only_finite,
          max_norm.is_none() ? 0.0F : max_norm.cast<float>(),
          backend.optional_float(before, "before"),
          backend.optional_float(skipped, "skipped")};
}

// Documented in step/ops.h and fastamp/_native.pyi.
void define_step(py::module_& module) {
  py::class_<PackedTensors>(module, "PackedTensors").def_readonly("rest", &PackedTensors::rest);
  py::class_<OpTable>(module, "OpTable")
      .def(py::init(&table_at), py::arg("address"), py::arg("size"));
  py::class_<Backend> backend(module, "Backend");
  backend
      .def(py::init([](const OpTable& ops, bool is_apart, const py::object& device,
                       std::optional<int> index) {
             const dlpack::Device found = index ? dlpack::Device{dlpack::kCuda, *index} : kHost;
             return Backend{ops, is_apart, found, device};
           }),
           py::arg("ops"), py::arg("is_apart"), py::arg("device"), py::arg("cuda_index"))
      .def_readonly("device", &Backend::torch_device)
      .def_readonly("is_apart", &Backend::is_apart)
      .def("pack", &pack, py::arg("tensors"))
      .def("grad_stats", &grad_stats, py::arg("tensors"), py::arg("scale"), py::arg("max_norm"),
           py::arg("only_finite"), py::arg("before"), py::arg("skipped"))
      .def("reduce", &reduce, py::arg("tensors"))
      .def("rescale", &rescale, py::arg("tensors"), py::arg("factor").none(false));
  module.def("check_device", &check_device, py::arg("device_index"));
  define_update(module, backend);
  module.attr("cpu_ops") = cpu_ops();
  module.attr("cuda_ops") = cuda_ops();
  module.attr("built_with_cuda") = cuda_ops() != nullptr;
}

}  // namespace fastamp
