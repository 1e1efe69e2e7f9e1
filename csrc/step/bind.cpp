// Unpacks the arguments of the step's ops, drops the GIL and calls the op table.
#include "module.h"

#include <pybind11/stl.h>

#include <optional>

#include "tensor/tensors.h"
#include "step/ops.h"

namespace fastamp {
namespace {

constexpr dlpack::DataType kFloat32{dlpack::kFloat, 32, 1};
constexpr dlpack::DataType kFloat64{dlpack::kFloat, 64, 1};
constexpr std::int64_t kNumStats = sizeof(GradStats) / sizeof(float);

/// The table of one backend, with the place where it runs.
struct BoundOps {
  const OpTable* table;
  bool on_cuda;
};

Launch launch_of(const BoundOps& ops, int place, std::optional<std::uintptr_t> stream) {
  if (!ops.on_cuda) return {place, 0, nullptr};
  return {0, place, stream ? reinterpret_cast<void*>(*stream) : current_stream(place)};
}

float* optional_float(const py::object& tensor, const char* argument) {
  return tensor.is_none() ? nullptr : static_cast<float*>(data_of(tensor, kFloat32, 1, argument));
}

void grad_stats(const BoundOps& ops, const PackedTensors& tensors, NormType norm_type,
                const py::object& scale, std::optional<float> max_norm, bool only_finite,
                const py::object& skipped, const py::object& work, const py::object& stats,
                int place, std::optional<std::uintptr_t> stream) {
  const ClipSpec clip{optional_float(scale, "scale"), max_norm.has_value(), only_finite,
                      max_norm.value_or(0.0F), optional_float(skipped, "skipped")};
  auto* slots = static_cast<double*>(data_of(work, kFloat64, 1 + tensors.num_chunks, "work"));
  auto* out = static_cast<GradStats*>(data_of(stats, kFloat32, kNumStats, "stats"));
  const Launch launch = launch_of(ops, place, stream);
  const py::gil_scoped_release no_gil;
  ops.table->grad_stats(tensors.views, norm_type, clip, slots, out, launch);
}

void rescale(const BoundOps& ops, const PackedTensors& tensors, const py::object& factor, int place,
             std::optional<std::uintptr_t> stream) {
  const auto* value = static_cast<float*>(data_of(factor, kFloat32, 1, "factor"));
  const Launch launch = launch_of(ops, place, stream);
  const py::gil_scoped_release no_gil;
  ops.table->rescale(tensors.views, value, launch);
}

}  // namespace

void define_step(py::module_& module) {
  py::enum_<NormType>(module, "NormType")
      .value("L1", NormType::kL1)
      .value("L2", NormType::kL2)
      .value("INF", NormType::kInf);
  module.attr("NUM_STATS") = kNumStats;
  py::class_<BoundOps>(module, "Ops", "The op table of one backend.")
      .def("grad_stats", &grad_stats, py::arg("tensors"), py::arg("norm_type"), py::arg("scale"),
           py::arg("max_norm"), py::arg("only_finite"), py::arg("skipped"), py::arg("work"),
           py::arg("stats"), py::arg("place"), py::arg("stream") = py::none(),
           "Read the gradients once; place is the number of threads or the CUDA device.")
      .def("rescale", &rescale, py::arg("tensors"), py::arg("factor"), py::arg("place"),
           py::arg("stream") = py::none(), "Multiply the gradients in place by a 0-dim tensor.");
  module.attr("cpu_ops") = BoundOps{&cpu_ops(), false};
  module.attr("cuda_ops") = BoundOps{&cuda_ops(), true};
  module.attr("built_with_cuda") = built_with_cuda();
}

}  // namespace fastamp
