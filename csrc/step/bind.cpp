// The step, as Python sees it: tensors are read, the GIL is dropped, the op table does the rest.
#include <pybind11/stl.h>

#include <optional>

#include "step/bind.h"

namespace fastamp {
namespace {

PackedTensors pack(const py::object& tensors, std::optional<int> cuda_device) {
  const dlpack::Device device = device_of(cuda_device);
  PackedTensors packed;
  packed.cuda_device = cuda_device;
  packed.tensors = py::reinterpret_steal<py::tuple>(PySequence_Tuple(tensors.ptr()));
  if (!packed.tensors) throw py::error_already_set();
  const auto size = PyTuple_GET_SIZE(packed.tensors.ptr());
  packed.views.reserve(static_cast<std::size_t>(size));
  AddressSet seen(static_cast<std::size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    const auto view = read_dense(PyTuple_GET_ITEM(packed.tensors.ptr(), i), device);
    if (!view || (view->numel > 0 && !seen.insert(view->data)))
      packed.rest.push_back(i);
    else
      add_view(packed, *view);
  }
  return packed;
}

void grad_stats(const OpTable& ops, const PackedTensors& tensors, NormType norm_type,
                const py::object& scale, std::optional<float> max_norm, bool only_finite,
                const py::object& skipped, const py::object& work, const py::object& stats,
                int num_threads) {
  const ClipSpec clip{optional_float(scale, "scale"), max_norm.has_value(), only_finite,
                      max_norm.value_or(0.0F), optional_float(skipped, "skipped")};
  const std::int64_t size = 1 + tensors.num_chunks;
  std::vector<double> on_host(work.is_none() ? static_cast<std::size_t>(size) : 0);
  auto* slots =
      work.is_none() ? on_host.data() : static_cast<double*>(data_of(work, kFloat64, size, "work"));
  auto* out = static_cast<GradStats*>(data_of(stats, kFloat32, kNumStats, "stats"));
  const Launch launch = launch_on(tensors.cuda_device, num_threads);
  const py::gil_scoped_release no_gil;
  ops.grad_stats(tensors.views, norm_type, clip, slots, out, launch);
}

void rescale(const OpTable& ops, const PackedTensors& tensors, const py::object& factor,
             int num_threads) {
  const auto* value = static_cast<float*>(data_of(factor, kFloat32, 1, "factor"));
  const Launch launch = launch_on(tensors.cuda_device, num_threads);
  const py::gil_scoped_release no_gil;
  ops.rescale(tensors.views, value, launch);
}

OpTable table_at(std::uintptr_t address, std::size_t size) {
  if (size != sizeof(OpTable))
    throw py::value_error("size: the table was compiled from other sources than this module");
  return *reinterpret_cast<const OpTable*>(address);
}

}  // namespace

// Documented in step/ops.h and fastamp/_ops/types.py.
void define_step(py::module_& module) {
  py::enum_<NormType>(module, "NormType")
      .value("L1", NormType::kL1)
      .value("L2", NormType::kL2)
      .value("INF", NormType::kInf);
  py::class_<PackedTensors>(module, "PackedTensors")
      .def_readonly("rest", &PackedTensors::rest)
      .def_readonly("has_float16", &PackedTensors::has_float16)
      .def_readonly("num_chunks", &PackedTensors::num_chunks)
      .def_readonly("tensors", &PackedTensors::tensors);
  module.def("pack", &pack, py::arg("tensors"), py::arg("cuda_device"));
  py::class_<OpTable> ops(module, "Ops");
  ops.def(py::init(&table_at), py::arg("address"), py::arg("size"),
          "Use the table of another library: that of the CUDA kernels, emulated for tests.")
      .def("grad_stats", &grad_stats, py::arg("tensors"), py::arg("norm_type"), py::arg("scale"),
           py::arg("max_norm"), py::arg("only_finite"), py::arg("skipped"), py::arg("work"),
           py::arg("stats"), py::arg("num_threads"))
      .def("rescale", &rescale, py::arg("tensors"), py::arg("factor"), py::arg("num_threads"));
  module.def("check_device", &check_device, py::arg("device_index"));
  define_update(module, ops);
  module.attr("NUM_STATS") = kNumStats;
  module.attr("cpu_ops") = cpu_ops();
  module.attr("cuda_ops") = cuda_ops();
  module.attr("built_with_cuda") = built_with_cuda();
}

}  // namespace fastamp
