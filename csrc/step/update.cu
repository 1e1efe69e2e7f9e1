// The GPU's update: one pass over parameters, gradients and states, a block for each chunk of a
// parameter, all groups and dtypes together. Nothing is read back.
#include <cstdint>

#include "step/device.h"
#include "step/launcher.cuh"
#include "step/ops.h"
#include "step/rules.h"
#include "step/vectors.cuh"

namespace fastamp {
namespace {

// 600 parameters of Adam fit in a launch.
static_assert(600 * sizeof(Entry<2>) + 40 * sizeof(GroupOptions) <= kLongTable);

/// Updates one chunk. Neighboring threads have neighboring vectors.
template <typename Kind>
__device__ void update_chunk(const Entry<Kind::kStates>& entry, std::int64_t start, int numel,
                             const typename Kind::Terms& terms, const UpdateSpec& spec) {
  constexpr int kGrad = 1 + Kind::kStates;
  const float factor = factor_of(spec);
  const bool write_grads = spec.write_grads && factor != 1.0F;
  const TensorChunk param(entry.tensors[0], entry.param_format, start);
  const TensorChunk grad(entry.tensors[kGrad], entry.grad_format, start);
  const auto state = [&](int s) {
    return TensorChunk(entry.tensors[1 + s], entry.state_format, start);
  };
  for (int i = static_cast<int>(threadIdx.x) * kVector; i < numel; i += kThreads * kVector) {
    const int count = numel - i;
    Raw raws[2 + Kind::kStates];
    param.load(i, count, raws[0]);
#pragma unroll
    for (int s = 0; s < Kind::kStates; ++s) state(s).load(i, count, raws[1 + s]);
    grad.load(i, count, raws[kGrad]);  // last: DDP's views of buckets may be misaligned
    float values[2 + Kind::kStates][kVector];
    param.widen(raws[0], values[0]);
#pragma unroll
    for (int s = 0; s < Kind::kStates; ++s) state(s).widen(raws[1 + s], values[1 + s]);
    grad.widen(raws[kGrad], values[kGrad]);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      float states[kMaxStates];
#pragma unroll
      for (int s = 0; s < Kind::kStates; ++s) states[s] = values[1 + s][k];
      values[kGrad][k] = product(values[kGrad][k], factor);
      Kind::apply(terms, values[kGrad][k], values[0][k], states);
#pragma unroll
      for (int s = 0; s < Kind::kStates; ++s) values[1 + s][k] = states[s];
    }
    if (write_grads) grad.store(values[kGrad], i, count);
    param.store(values[0], i, count);
#pragma unroll
    for (int s = 0; s < Kind::kStates; ++s) state(s).store(values[1 + s], i, count);
  }
}

/// One block updates one chunk.
template <typename Kind, std::size_t kBytes>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    update_kernel(const UpdateTable<Entry<Kind::kStates>, kBytes> __grid_constant__ table,
                  UpdateSpec spec) {
  __shared__ typename Kind::Terms terms;
  if (is_skipped(spec)) return;
  const Place place = table.place(blockIdx.x);
  const auto& entry = table.entries()[place.entry];
  if (threadIdx.x == 0) terms = terms_of<Kind>(table, entry);
  __syncthreads();
  const typename Kind::Terms own = terms;  // in registers
  update_chunk<Kind>(entry, place.start, place.numel, own, spec);
}

}  // namespace

void check_update_kernels() {
  for_each_kind([](auto kind) {
    check_kernel("update_kernel", update_kernel<decltype(kind), kLongTable>);
    check_kernel("update_kernel", update_kernel<decltype(kind), kShortTable>);
  });
  check_lean_kernels();
}

void update_on_cuda(const UpdateList& list, const UpdateSpec& spec, const Launch& where) {
  const DeviceGuard guard(where.device_index);
  const auto stream = static_cast<cudaStream_t>(where.stream);
  if (spec.counts) launch_count(list, spec.found_inf, stream);
  launch_lean(list, spec, stream);
  for_each_kind([&](auto kind) {
    using Kind = decltype(kind);
    if (Kind::kRule != list.rule) return;
    Launcher<Entry<Kind::kStates>> launcher("update_kernel", update_kernel<Kind, kLongTable>,
                                            update_kernel<Kind, kShortTable>, list, spec, stream);
    for (const ParameterView& view : list.parameters)
      if (view.is_plain() && Kind::serves(list.groups[view.group])) launcher.add({}, view);
    launcher.flush();
  });
}

}  // namespace fastamp
