// The GPU's update: one pass over parameters, gradients and states, a block for each chunk of a
// parameter, all groups and dtypes together. Nothing is read back.
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "step/convert.cuh"
#include "step/device.h"
#include "step/math.h"
#include "step/ops.h"
#include "step/rules.h"
#include "step/table.cuh"

namespace fastamp {
namespace {

constexpr int kThreads = 256;

struct Entry {
  ParameterView view;
  GroupOptions group;
  std::uint32_t first_chunk;
};
constexpr int kMaxEntries = 220;
static_assert(sizeof(Table<Entry, kMaxEntries>) + 64 <= 32764, "a kernel's arguments");

__device__ float load(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::kBFloat16:
      return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
    case DType::kFloat16:
      return to_float(static_cast<const __half*>(data)[i]);
    case DType::kFloat32:
      break;
  }
  return static_cast<const float*>(data)[i];
}

__device__ void store(float value, void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::kBFloat16:
      return from_float(value, static_cast<__nv_bfloat16*>(data) + i);
    case DType::kFloat16:
      return from_float(value, static_cast<__half*>(data) + i);
    case DType::kFloat32:
      break;
  }
  static_cast<float*>(data)[i] = value;
}

__device__ bool is_skipped(const UpdateSpec& spec) {
  return spec.found_inf != nullptr && *spec.found_inf != 0;
}

/// One block updates one chunk. Neighbouring threads have neighbouring elements.
template <typename Kind, int kMax>
__global__ void __launch_bounds__(kThreads)
    update_kernel(const Table<Entry, kMax> __grid_constant__ table, UpdateSpec spec) {
  __shared__ typename Kind::Terms terms;
  if (is_skipped(spec)) return;
  const Entry& entry = table.entries[find_entry(table, blockIdx.x)];
  const ParameterView& view = entry.view;
  if (threadIdx.x == 0)
    terms = Kind::terms(entry.group, view.step == nullptr ? 0.0F : *view.step + 1);
  __syncthreads();
  const float factor = spec.factor == nullptr ? 1.0F : *spec.factor;
  const bool write_grads = spec.write_grads && factor != 1.0F;
  const std::int64_t start = static_cast<std::int64_t>(blockIdx.x - entry.first_chunk) * kChunk;
  const std::int64_t end = start + kChunk < view.numel ? start + kChunk : view.numel;
#pragma unroll 4
  for (std::int64_t i = start + threadIdx.x; i < end; i += kThreads) {
    const float grad = product(load(view.grad, view.grad_dtype, i), factor);
    float param = load(view.param, view.param_dtype, i);
    float states[kMaxStates];
#pragma unroll
    for (int s = 0; s < Kind::kStates; ++s) states[s] = load(view.states[s], view.state_dtype, i);
    Kind::apply(terms, grad, param, states);
    if (write_grads) store(grad, view.grad, view.grad_dtype, i);
    store(param, view.param, view.param_dtype, i);
#pragma unroll
    for (int s = 0; s < Kind::kStates; ++s) store(states[s], view.states[s], view.state_dtype, i);
  }
}

/// Counts the step, once all chunks have read the count before. One thread for each parameter.
template <int kMax>
__global__ void __launch_bounds__(kThreads)
    count_kernel(const Table<Entry, kMax> __grid_constant__ table, UpdateSpec spec) {
  if (is_skipped(spec)) return;
  for (std::uint32_t i = threadIdx.x; i < table.count; i += kThreads)
    if (table.entries[i].view.step != nullptr) *table.entries[i].view.step += 1;
}

/// Updates the parameters whose groups follow one kind of rule: Adam with amsgrad or without.
template <typename Kind>
void update_kind(const UpdateList& list, const std::vector<std::uint32_t>& chosen,
                 const UpdateSpec& spec, cudaStream_t stream) {
  const auto add = [&](std::size_t i, auto* table) {
    const ParameterView& view = list.parameters[chosen[i]];
    table->entries[table->count++] = {view, list.groups[view.group], table->num_chunks};
    table->num_chunks += static_cast<std::uint32_t>(chunks_of(view.numel));
  };
  for_each_table<Entry, kMaxEntries>(chosen.size(), add, [&](const auto& table) {
    constexpr int kMax = std::decay_t<decltype(table)>::kSize;
    if (table.num_chunks > 0)
      launch("update_kernel", update_kernel<Kind, kMax>, table.num_chunks, kThreads, stream, table,
             spec);
    if (list.rule != Rule::kSgd)
      launch("count_kernel", count_kernel<kMax>, 1, kThreads, stream, table, spec);
  });
}

template <typename Kind, int... kMax>
void check_kernels(std::integer_sequence<int, kMax...>) {
  (check_kernel("update_kernel", update_kernel<Kind, kMax>), ...);
  (check_kernel("count_kernel", count_kernel<kMax>), ...);
}

}  // namespace

void check_update_kernels() {
  constexpr TableSizes<kMaxEntries> sizes;
  check_kernels<Adam<false>>(sizes);
  check_kernels<Adam<true>>(sizes);
  check_kernels<Sgd<false>>(sizes);
  check_kernels<Sgd<true>>(sizes);
  check_kernels<Adagrad>(sizes);
}

void update_on_cuda(const UpdateList& list, const UpdateSpec& spec, const Launch& where) {
  const DeviceGuard guard(where.device_index);
  std::vector<std::uint32_t> chosen[kMaxStates + 1];  // by the number of states
  for (std::uint32_t i = 0; i < list.parameters.size(); ++i)
    visit_rule(list.rule, list.groups[list.parameters[i].group],
               [&](auto kind) { chosen[decltype(kind)::kStates].push_back(i); });
  for (const std::vector<std::uint32_t>& some : chosen)
    if (!some.empty())
      visit_rule(list.rule, list.groups[list.parameters[some[0]].group], [&](auto kind) {
        update_kind<decltype(kind)>(list, some, spec, static_cast<cudaStream_t>(where.stream));
      });
}

}  // namespace fastamp
