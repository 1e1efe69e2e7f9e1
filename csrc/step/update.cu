// The GPU's update: one pass over parameters, gradients and states, a block for each chunk of a
// parameter, all groups and dtypes together. Nothing is read back.
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
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

/// Values that neighboring parameters mostly share.
struct Row {
  GroupOptions options;
  float counted;
  Counting counting;
};

/// One parameter. Its gradient is the last tensor, behind the states.
template <int kStates>
struct Entry {
  void* tensors[2 + kStates];
  float* step;
  std::uint32_t first_chunk;
  std::uint32_t tail_numel : 17;  // elements of the last chunk
  std::uint32_t row : 9;
  std::uint32_t param_dtype : 2;
  std::uint32_t grad_dtype : 2;
  std::uint32_t state_dtype : 2;
};

/// Entries, and behind them their rows: many parameters of few groups, or fewer of many.
template <typename Entry, std::size_t kBytes>
struct UpdateTable {
  alignas(8) unsigned char room[kBytes];
  std::uint32_t count;
  std::uint32_t num_chunks;

  __device__ const Entry* entries() const { return reinterpret_cast<const Entry*>(room); }
  __device__ const Row& row(std::uint32_t i) const {
    return reinterpret_cast<const Row*>(room + count * sizeof(Entry))[i];
  }
};
constexpr std::size_t kLargest = 32720;
using Sizes = std::integer_sequence<std::size_t, 4000, kLargest>;  // a launch copies it all
static_assert(sizeof(UpdateTable<Entry<3>, kLargest>) + sizeof(UpdateSpec) <= kMaxArguments);
static_assert(kLargest / sizeof(Row) < 1U << 9);
static_assert(600 * sizeof(Entry<2>) + 40 * sizeof(Row) <= kLargest);  // 600 of Adam's in a launch

using Counts = Table<float*, 4000>;
static_assert(sizeof(Counts) + sizeof(UpdateSpec) <= kMaxArguments);

__device__ bool is_skipped(const UpdateSpec& spec) {
  return spec.found_inf != nullptr && *spec.found_inf != 0;
}

/// Returns the number of this step.
__device__ float count_of(const Row& row, const float* step) {
  const bool counts = step != nullptr && row.counting != Counting::kHostAnew;
  return row.counted + (counts ? *step : 0.0F) + 1;
}

/// Subtracts a skipped step from the count, since the host has counted it. Nothing races: other
/// blocks read a count only in a step that is not skipped, which does not write it.
__device__ void count_skipped(const Row& row, float* step, bool skipped) {
  if (row.counting == Counting::kHostAnew) *step = skipped ? -1.0F : 0.0F;
  if (row.counting == Counting::kHost && skipped) *step -= 1;
}

/// Updates one chunk. Neighboring threads have neighboring vectors.
template <typename Kind>
__device__ void update_chunk(const Entry<Kind::kStates>& entry, std::int64_t start, int numel,
                             const typename Kind::Terms& terms, const UpdateSpec& spec) {
  constexpr int kGrad = 1 + Kind::kStates;
  const float factor = spec.factor == nullptr ? 1.0F : *spec.factor;
  const bool write_grads = spec.write_grads && factor != 1.0F;
  const Part param(entry.tensors[0], entry.param_dtype, start);
  const Part grad(entry.tensors[kGrad], entry.grad_dtype, start);
  const auto state = [&](int s) { return Part(entry.tensors[1 + s], entry.state_dtype, start); };
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
template <typename Kind, std::size_t kBytes>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    update_kernel(const UpdateTable<Entry<Kind::kStates>, kBytes> __grid_constant__ table,
                  UpdateSpec spec) {
  __shared__ typename Kind::Terms terms;
  const auto* entries = table.entries();
  const std::uint32_t found = find_entry(entries, table.count, blockIdx.x);
  const auto& entry = entries[found];
  const Row& row = table.row(entry.row);
  const bool skipped = is_skipped(spec);
  if (threadIdx.x == 0 && !skipped) {
    GroupOptions options = row.options;
    if (options.lr_on_device != nullptr) options.lr = *options.lr_on_device;
    terms = Kind::terms(options, count_of(row, entry.step));
  }
  if (threadIdx.x == 0 && blockIdx.x == entry.first_chunk) count_skipped(row, entry.step, skipped);
  if (skipped) return;
  __syncthreads();
  const std::uint32_t end =
      found + 1 < table.count ? entries[found + 1].first_chunk : table.num_chunks;
  const int numel = blockIdx.x + 1 == end ? static_cast<int>(entry.tail_numel) : int{kChunk};
  const auto start = static_cast<std::int64_t>(blockIdx.x - entry.first_chunk) * kChunk;
  const typename Kind::Terms own = terms;  // in registers
  update_chunk<Kind>(entry, start, numel, own, spec);
}

/// Counts the step where the counts are on the device, after all chunks have read the old count:
/// one launch for up to 4,000 parameters costs less than an atomic counter for each block.
template <int kMax>
__global__ void __launch_bounds__(kThreads)
    count_kernel(const Table<float*, kMax> __grid_constant__ table, UpdateSpec spec) {
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
    bool is_new = !continues_row(view);
    if (nbytes(1, is_new ? 1 : 0) > kLargest) {
      flush();
      is_new = true;
    }
    if (is_new) rows_.push_back({list.groups[view.group], view.counted, view.counting});
    group_ = view.group;
    // An empty parameter has a block, too, which counts the step.
    const std::int64_t chunks = view.numel > 0 ? chunks_of(view.numel) : 1;
    Item item{};
    item.tensors[0] = view.param;
    for (int s = 0; s < Kind::kStates; ++s) item.tensors[1 + s] = view.states[s];
    item.tensors[1 + Kind::kStates] = view.grad;
    item.step = view.step;
    item.first_chunk = num_chunks_;
    item.tail_numel = static_cast<std::uint32_t>(view.numel - (chunks - 1) * kChunk) & 0x1ffffU;
    item.row = static_cast<std::uint32_t>(rows_.size() - 1) & 0x1ffU;
    item.param_dtype = static_cast<std::uint32_t>(view.param_dtype) & 3U;
    item.grad_dtype = static_cast<std::uint32_t>(view.grad_dtype) & 3U;
    item.state_dtype = static_cast<std::uint32_t>(view.state_dtype) & 3U;
    items_.push_back(item);
    num_chunks_ += static_cast<std::uint32_t>(chunks);
  }

  void flush() {
    if (!items_.empty()) launch_smallest(Sizes{});
    items_.clear();
    rows_.clear();
    num_chunks_ = 0;
  }

 private:
  bool continues_row(const ParameterView& view) const {
    return !rows_.empty() && group_ == view.group && rows_.back().counted == view.counted &&
           rows_.back().counting == view.counting;
  }

  std::size_t nbytes(std::size_t more_items, std::size_t more_rows) const {
    return (items_.size() + more_items) * sizeof(Item) + (rows_.size() + more_rows) * sizeof(Row);
  }

  template <std::size_t... kBytes>
  void launch_smallest(std::integer_sequence<std::size_t, kBytes...>) {
    static_cast<void>((launch_in<kBytes>() || ...));
  }

  template <std::size_t kBytes>
  bool launch_in() {
    if (nbytes(0, 0) > kBytes) return false;
    UpdateTable<Item, kBytes> table;
    const std::size_t rows_at = items_.size() * sizeof(Item);
    std::memcpy(table.room, items_.data(), rows_at);
    std::memcpy(table.room + rows_at, rows_.data(), rows_.size() * sizeof(Row));
    table.count = static_cast<std::uint32_t>(items_.size());
    table.num_chunks = num_chunks_;
    launch("update_kernel", update_kernel<Kind, kBytes>, num_chunks_, kThreads, stream_, table,
           spec_);
    return true;
  }

  std::vector<Item> items_;
  std::vector<Row> rows_;
  std::uint32_t num_chunks_ = 0;
  std::uint32_t group_ = 0;  // of the last row
  UpdateSpec spec_;
  cudaStream_t stream_;
};

void count_on_device(const std::vector<float*>& steps, const UpdateSpec& spec,
                     cudaStream_t stream) {
  const auto add = [&](std::size_t i, auto* table) { table->entries[table->count++] = steps[i]; };
  for_each_table<float*, Counts::kSize>(steps.size(), add, [&](const auto& table) {
    constexpr int kMax = std::decay_t<decltype(table)>::kSize;
    launch("count_kernel", count_kernel<kMax>, (table.count + kThreads - 1) / kThreads, kThreads,
           stream, table, spec);
  });
}

template <typename Kind, std::size_t... kBytes>
void check_kernels(std::integer_sequence<std::size_t, kBytes...>) {
  (check_kernel("update_kernel", update_kernel<Kind, kBytes>), ...);
}

template <int... kMax>
void check_count_kernels(std::integer_sequence<int, kMax...>) {
  (check_kernel("count_kernel", count_kernel<kMax>), ...);
}

}  // namespace

void check_update_kernels() {
  check_kernels<Adam<false>>(Sizes{});
  check_kernels<Adam<true>>(Sizes{});
  check_kernels<Sgd<false>>(Sizes{});
  check_kernels<Sgd<true>>(Sizes{});
  check_kernels<Adagrad>(Sizes{});
  check_count_kernels(TableSizes<Counts::kSize>{});
}

void update_on_cuda(const UpdateList& list, const UpdateSpec& spec, const Launch& where) {
  const DeviceGuard guard(where.device_index);
  const auto stream = static_cast<cudaStream_t>(where.stream);
  std::vector<std::uint32_t> chosen[kMaxStates + 1];  // by the number of states
  std::vector<float*> steps;
  for (std::uint32_t i = 0; i < list.parameters.size(); ++i) {
    const ParameterView& view = list.parameters[i];
    visit_rule(list.rule, list.groups[view.group],
               [&](auto kind) { chosen[decltype(kind)::kStates].push_back(i); });
    if (view.step != nullptr && view.counting == Counting::kDevice) steps.push_back(view.step);
  }
  for (const std::vector<std::uint32_t>& some : chosen) {
    if (some.empty()) continue;
    visit_rule(list.rule, list.groups[list.parameters[some[0]].group], [&](auto kind) {
      Launcher<decltype(kind)> launcher(spec, stream);
      for (const std::uint32_t i : some) launcher.add(list, list.parameters[i]);
      launcher.flush();
    });
  }
  count_on_device(steps, spec, stream);
}

}  // namespace fastamp
