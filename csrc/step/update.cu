// The GPU's update: one pass over parameters, gradients and states, a block for each chunk of a
// parameter, all groups and dtypes together. Nothing is read back.
#include <cstdint>
#include <cstring>
#include <vector>

#include "step/device.h"
#include "step/math.h"
#include "step/ops.h"
#include "step/rules.h"
#include "step/table.cuh"
#include "step/vectors.cuh"

namespace fastamp {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 4;  // 1,024 threads; see vectors.cuh

/// One parameter. Its gradient is the last tensor, behind the states.
template <int kStates>
struct Entry {
  void* tensors[2 + kStates];
  float* step;
  std::uint32_t first_chunk;
  std::uint32_t tail_numel : 17;  // elements of the last chunk
  std::uint32_t group : 9;
  std::uint32_t param_dtype : 2;
  std::uint32_t grad_dtype : 2;
  std::uint32_t state_dtype : 2;
};

constexpr std::size_t kTableBytes = 32720;

/// Entries, and behind them their groups' options: many parameters of few groups, or fewer of many.
template <typename Entry>
struct UpdateTable {
  alignas(8) unsigned char room[kTableBytes];
  std::uint32_t count;
  std::uint32_t num_chunks;

  __device__ const Entry* entries() const { return reinterpret_cast<const Entry*>(room); }
  __device__ const GroupOptions& group(std::uint32_t i) const {
    return reinterpret_cast<const GroupOptions*>(room + count * sizeof(Entry))[i];
  }
};
static_assert(sizeof(UpdateTable<Entry<3>>) + sizeof(UpdateSpec) <= kMaxArguments);
static_assert(kTableBytes / sizeof(GroupOptions) < 1U << 9);
// 600 parameters of Adam fit in a launch.
static_assert(600 * sizeof(Entry<2>) + 40 * sizeof(GroupOptions) <= kTableBytes);

constexpr int kMaxCounts = 4000;
using CountTable = Table<float*, kMaxCounts>;
static_assert(sizeof(CountTable) + sizeof(UpdateSpec) <= kMaxArguments);

/// Updates one chunk. Neighboring threads have neighboring vectors.
template <typename Kind>
__device__ void update_chunk(const Entry<Kind::kStates>& entry, std::int64_t start, int numel,
                             const typename Kind::Terms& terms, const UpdateSpec& spec) {
  constexpr int kGrad = 1 + Kind::kStates;
  const float factor = factor_of(spec);
  const bool write_grads = spec.write_grads && factor != 1.0F;
  const TensorChunk param(entry.tensors[0], entry.param_dtype, start);
  const TensorChunk grad(entry.tensors[kGrad], entry.grad_dtype, start);
  const auto state = [&](int s) {
    return TensorChunk(entry.tensors[1 + s], entry.state_dtype, start);
  };
  for (int i = static_cast<int>(threadIdx.x) * kVector; i < numel; i += kThreads * kVector) {
    const int count = numel - i < kVector ? numel - i : kVector;
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
template <typename Kind>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    update_kernel(const UpdateTable<Entry<Kind::kStates>> __grid_constant__ table,
                  UpdateSpec spec) {
  __shared__ typename Kind::Terms terms;
  if (is_skipped(spec)) return;
  const auto* entries = table.entries();
  const Place place = find_place(entries, table.count, table.num_chunks, blockIdx.x);
  const auto& entry = entries[place.entry];
  if (threadIdx.x == 0) {
    GroupOptions options = table.group(entry.group);
    if (options.lr_on_device != nullptr) options.lr = *options.lr_on_device;
    terms = Kind::terms(options, step_after(entry.step));
  }
  __syncthreads();
  const typename Kind::Terms own = terms;  // in registers
  update_chunk<Kind>(entry, place.start, place.numel, own, spec);
}

/// Counts the step, after all chunks have read the old count: one launch for up to 4,000 parameters
/// costs less than an atomic counter for each block.
__global__ void __launch_bounds__(kThreads)
    count_kernel(const CountTable __grid_constant__ table, UpdateSpec spec) {
  const std::uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i < table.count && !is_skipped(spec)) *table.entries[i] += 1;
}

/// Packs the parameters of one kind of rule, such as Adam with amsgrad or without, into launches.
template <typename Kind>
class Launcher {
 public:
  using Item = Entry<Kind::kStates>;

  Launcher(const UpdateSpec& spec, cudaStream_t stream) : spec_(spec), stream_(stream) {}

  void add(const UpdateList& list, const ParameterView& view) {
    if (nbytes() + sizeof(Item) + sizeof(GroupOptions) > kTableBytes) flush();
    if (groups_.empty() || group_ != view.group) groups_.push_back(list.groups[view.group]);
    group_ = view.group;
    // An empty parameter has a block, too, which counts the step.
    const std::int64_t chunks = view.numel > 0 ? chunks_of(view.numel) : 1;
    Item item{};
    item.tensors[0] = view.param;
    for (int s = 0; s < Kind::kStates; ++s) item.tensors[1 + s] = view.states[s];
    item.tensors[1 + Kind::kStates] = view.grad;
    item.step = view.step;
    item.group = static_cast<std::uint32_t>(groups_.size() - 1) & 0x1ffU;
    item.param_dtype = static_cast<std::uint32_t>(view.param_dtype) & 3U;
    item.grad_dtype = static_cast<std::uint32_t>(view.grad_dtype) & 3U;
    item.state_dtype = static_cast<std::uint32_t>(view.state_dtype) & 3U;
    place_entry(item, view.numel, chunks, num_chunks_);
    items_.push_back(item);
  }

  void flush() {
    if (items_.empty()) return;
    UpdateTable<Item> table;
    const std::size_t groups_at = items_.size() * sizeof(Item);
    std::memcpy(table.room, items_.data(), groups_at);
    std::memcpy(table.room + groups_at, groups_.data(), nbytes() - groups_at);
    table.count = static_cast<std::uint32_t>(items_.size());
    table.num_chunks = num_chunks_;
    launch("update_kernel", update_kernel<Kind>, num_chunks_, kThreads, stream_, table, spec_);
    items_.clear();
    groups_.clear();
    num_chunks_ = 0;
  }

 private:
  std::size_t nbytes() const {
    return items_.size() * sizeof(Item) + groups_.size() * sizeof(GroupOptions);
  }

  std::vector<Item> items_;
  std::vector<GroupOptions> groups_;  // of the items, in their order
  std::uint32_t num_chunks_ = 0;
  std::uint32_t group_ = 0;  // the last of them, in the whole list
  UpdateSpec spec_;
  cudaStream_t stream_;
};

}  // namespace

void check_update_kernels() {
  for_each_kind([](auto kind) { check_kernel("update_kernel", update_kernel<decltype(kind)>); });
  check_kernel("count_kernel", count_kernel);
}

void update_on_cuda(const UpdateList& list, const UpdateSpec& spec, const Launch& where) {
  const DeviceGuard guard(where.device_index);
  const auto stream = static_cast<cudaStream_t>(where.stream);
  for_each_kind([&](auto kind) {
    using Kind = decltype(kind);
    if (Kind::kRule != list.rule) return;
    Launcher<Kind> launcher(spec, stream);
    for (const ParameterView& view : list.parameters)
      if (Kind::serves(list.groups[view.group])) launcher.add(list, view);
    launcher.flush();
  });
  const auto add = [&](std::size_t i, CountTable& table) {
    if (float* step = list.parameters[i].step) table.entries[table.count++] = step;
  };
  for_each_table<float*, kMaxCounts>(list.parameters.size(), add, [&](const CountTable& table) {
    const std::uint32_t blocks = (table.count + kThreads - 1) / kThreads;
    if (blocks > 0) launch("count_kernel", count_kernel, blocks, kThreads, stream, table, spec);
  });
}

}  // namespace fastamp
