// The launches of an update: parameters with their groups' options, as many as a kernel's arguments
// hold.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "step/device.h"
#include "step/formats.h"
#include "step/rules.h"
#include "step/table.cuh"

namespace fastamp {

constexpr int kThreads = 256;

constexpr int kBlocksPerProcessor = 4;  // 1,024 threads, see vectors.cuh

/// One parameter. Its gradient is the last tensor, behind the states.
template <int kCount>
struct Entry {
  static constexpr int kStates = kCount;
  void* tensors[2 + kStates];
  float* step;
  std::uint32_t first_chunk;
  std::uint32_t tail_numel : 17;  // elements of the last chunk
  std::uint32_t group : 9;
  std::uint32_t param_format : 2;
  std::uint32_t grad_format : 2;
  std::uint32_t state_format : 2;  // unless they are codes
};

/// Entries, and behind them their groups' options: many parameters of few groups, or fewer of many.
template <typename Entry, std::size_t kBytes>
struct UpdateTable {
  alignas(8) unsigned char room[kBytes];
  std::uint32_t count;
  std::uint32_t num_chunks;
  std::uint32_t chunk;  // elements of a chunk

  __device__ const Entry* entries() const { return reinterpret_cast<const Entry*>(room); }
  __device__ Place place(std::uint32_t index) const {
    return find_place(entries(), count, num_chunks, index, chunk);
  }
  __device__ const GroupOptions& group(std::uint32_t i) const {
    return reinterpret_cast<const GroupOptions*>(room + count * sizeof(Entry))[i];
  }
};
static_assert(kLongTable / sizeof(GroupOptions) < 1U << 9);

/// Returns the terms of an entry's group, for its next step. One thread calls it.
template <typename Kind, typename Table, typename Entry>
__device__ typename Kind::Terms terms_of(const Table& table, const Entry& entry) {
  GroupOptions options = table.group(entry.group);
  if (options.lr_on_device != nullptr) options.lr = *options.lr_on_device;
  return Kind::terms(options, step_of(entry.step));
}

/// Returns the elements of a chunk, which a block of threads updates: of short lists fewer, so that
/// they fill the device, too. Each block computes its terms, which takes as long as 4,096 elements.
inline std::uint32_t chunk_of(const UpdateList& list) {
  constexpr std::int64_t kManyBlocks = 1024;  // twice as many as run at once on an H200
  constexpr std::int64_t kSmallest = 4096;
  std::int64_t numel = 0;
  for (const ParameterView& view : list.parameters) numel += view.numel;
  std::int64_t chunk = kChunk;
  while (chunk > kSmallest && numel < kManyBlocks * chunk) chunk /= 2;
  return static_cast<std::uint32_t>(chunk);
}

/// Packs parameters into launches of one kernel, which has an instance for each size of table.
template <typename Item>
class Launcher {
 public:
  template <std::size_t kBytes>
  using Kernel = void (*)(const UpdateTable<Item, kBytes> __grid_constant__, UpdateSpec);
  static_assert(sizeof(UpdateTable<Item, kLongTable>) + sizeof(UpdateSpec) <= kMaxArguments);

  Launcher(const char* name, Kernel<kLongTable> kernel, Kernel<kShortTable> for_short_tables,
           const UpdateList& list, const UpdateSpec& spec, cudaStream_t stream)
      : name_(name),
        kernel_(kernel),
        for_short_tables_(for_short_tables),
        list_(list),
        chunk_(chunk_of(list)),
        spec_(spec),
        stream_(stream) {}

  /// Adds a parameter; fills in all that an Entry has.
  void add(Item item, const ParameterView& view) {
    if (nbytes() + sizeof(Item) + sizeof(GroupOptions) > kLongTable) flush();
    if (groups_.empty() || group_ != view.group) groups_.push_back(list_.groups[view.group]);
    group_ = view.group;
    item.tensors[0] = view.param.data;
    for (int s = 0; s < Item::kStates; ++s) item.tensors[1 + s] = view.states[s].data;
    item.tensors[1 + Item::kStates] = view.grad.data;
    item.step = view.step;
    item.group = static_cast<std::uint32_t>(groups_.size() - 1) & 0x1ffU;
    item.param_format = static_cast<std::uint32_t>(view.param.format) & 3U;
    item.grad_format = static_cast<std::uint32_t>(view.grad.format) & 3U;
    item.state_format = static_cast<std::uint32_t>(view.states[0].format) & 3U;
    place_entry(item, room_of(view), chunk_, num_chunks_);
    items_.push_back(item);
  }

  void flush() {
    if (items_.empty()) return;
    if (nbytes() <= kShortTable)
      launch_with(for_short_tables_);
    else
      launch_with(kernel_);
    items_.clear();
    groups_.clear();
    num_chunks_ = 0;
  }

 private:
  std::size_t nbytes() const {
    return items_.size() * sizeof(Item) + groups_.size() * sizeof(GroupOptions);
  }

  template <std::size_t kBytes>
  void launch_with(Kernel<kBytes> kernel) const {
    UpdateTable<Item, kBytes> table;
    const std::size_t groups_at = items_.size() * sizeof(Item);
    std::memcpy(table.room, items_.data(), groups_at);
    std::memcpy(table.room + groups_at, groups_.data(), nbytes() - groups_at);
    table.count = static_cast<std::uint32_t>(items_.size());
    table.num_chunks = num_chunks_;
    table.chunk = chunk_;
    launch(name_, kernel, num_chunks_, kThreads, stream_, table, spec_);
  }

  const char* name_;
  Kernel<kLongTable> kernel_;
  Kernel<kShortTable> for_short_tables_;
  const UpdateList& list_;
  std::uint32_t chunk_;
  std::vector<Item> items_;
  std::vector<GroupOptions> groups_;  // of the items, in their order
  std::uint32_t num_chunks_ = 0;
  std::uint32_t group_ = 0;  // the last of them, in the whole list
  UpdateSpec spec_;
  cudaStream_t stream_;
};

/// Updates the parameters that are not plain, lean.cu.
void launch_lean(const UpdateList& list, const UpdateSpec& spec, cudaStream_t stream);

/// Throws unless the current device has code for it.
void check_lean_kernels();

}  // namespace fastamp
