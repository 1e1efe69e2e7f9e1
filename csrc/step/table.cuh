// Tables of tensors that are passed as a kernel's argument, so that nothing is copied to the device
// and a captured graph holds its own copy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "step/math.h"
#include "step/ops.h"

namespace fastamp {

constexpr std::size_t kMaxArguments = 32764;  // bytes, of one kernel
// Bytes of a table: a launch copies all of it, so that short lists have a kernel of their own,
// whose arguments take 4 KB.
constexpr std::size_t kLongTable = 32688;
constexpr std::size_t kShortTable = 4024;

/// What every entry begins with, but for plain pointers: where its chunks lie, and its formats.
struct Chunked {
  std::uint32_t first_chunk;
  std::uint32_t tail_numel : 17;  // elements of the last chunk
  std::uint32_t group : 9;
  std::uint32_t param_format : 2;
  std::uint32_t grad_format : 2;
  std::uint32_t state_format : 2;  // unless they are codes
};
static_assert(kLongTable / sizeof(GroupOptions) < 1U << 9);

/// Where a chunk lies: in which entry, and in which of its elements.
struct Place {
  std::uint32_t entry;
  std::int64_t start;
  int numel;
};

/// Entries, and behind them their groups' options: many tensors of few groups, or fewer of many.
template <typename EntryType, std::size_t kBytes>
struct Table {
  using Entry = EntryType;
  alignas(8) unsigned char room[kBytes];
  std::uint32_t count;
  std::uint32_t num_chunks;
  std::uint32_t chunk;  // elements of a chunk

  __device__ const Entry* entries() const { return reinterpret_cast<const Entry*>(room); }
  __device__ const GroupOptions& group(std::uint32_t i) const {
    return reinterpret_cast<const GroupOptions*>(room + count * sizeof(Entry))[i];
  }

  /// Returns the place of a chunk. Its entry is the last one that begins at or before it.
  __device__ Place place(std::uint32_t index) const {
    std::uint32_t low = 0;
    std::uint32_t high = count;
    while (high - low > 1) {
      const std::uint32_t middle = (low + high) / 2;
      (entries()[middle].first_chunk <= index ? low : high) = middle;
    }
    const std::uint32_t end = high < count ? entries()[high].first_chunk : num_chunks;
    const auto start = static_cast<std::int64_t>(index - entries()[low].first_chunk) * chunk;
    return {low, start, static_cast<int>(index + 1 == end ? entries()[low].tail_numel : chunk)};
  }
};

/// Fills tables and calls use(table) with each.
template <typename Entry, typename Use>
class Packer {
 public:
  Packer(std::int64_t chunk, const Use& use)
      : chunk_(static_cast<std::uint32_t>(chunk)), use_(use) {}

  /// Adds an entry with `numel` elements, one chunk at least, and the options of its group.
  void add(Entry entry, std::int64_t numel = 0, const GroupOptions* group = nullptr) {
    if (nbytes() + sizeof(Entry) + sizeof(GroupOptions) > kLongTable) flush();
    if constexpr (!std::is_pointer_v<Entry>) {
      if (group != nullptr && (groups_.empty() || group != group_)) groups_.push_back(*group);
      group_ = group;
      const std::int64_t chunks = std::max<std::int64_t>(1, (numel + chunk_ - 1) / chunk_);
      entry.first_chunk = num_chunks_;
      entry.tail_numel = static_cast<std::uint32_t>(numel - (chunks - 1) * chunk_) & 0x1ffffU;
      entry.group = static_cast<std::uint32_t>(groups_.size() - 1) & 0x1ffU;
      num_chunks_ += static_cast<std::uint32_t>(chunks);
    }
    entries_.push_back(entry);
  }

  void flush() {
    if (nbytes() <= kShortTable)
      use_table<kShortTable>();
    else
      use_table<kLongTable>();
    entries_.clear();
    groups_.clear();
    num_chunks_ = 0;
  }

  bool is_empty() const { return entries_.empty(); }

 private:
  std::size_t nbytes() const {
    return entries_.size() * sizeof(Entry) + groups_.size() * sizeof(GroupOptions);
  }

  template <std::size_t kBytes>
  void use_table() const {
    Table<Entry, kBytes> table;
    const auto copy = [](const auto& from, unsigned char* to) {
      return std::copy_n(reinterpret_cast<const unsigned char*>(from.data()),
                         from.size() * sizeof(from[0]), to);
    };
    copy(groups_, copy(entries_, table.room));
    table.count = static_cast<std::uint32_t>(entries_.size());
    table.num_chunks = num_chunks_;
    table.chunk = chunk_;
    use_(table);
  }

  std::uint32_t chunk_;
  const Use& use_;
  std::vector<Entry> entries_;
  std::vector<GroupOptions> groups_;  // of the entries, in their order
  std::uint32_t num_chunks_ = 0;
  const GroupOptions* group_ = nullptr;  // the last of them, in the whole list
};

/// Calls use(table) for tables with all entries that fill(packer) adds; also with an empty one, if
/// it is asked for and there are none.
template <typename Entry, typename Fill, typename Use>
void for_each_table(std::int64_t chunk, const Fill& fill, const Use& use, bool also_empty = false) {
  Packer<Entry, Use> packer(chunk, use);
  fill(packer);
  if (!packer.is_empty() || also_empty) packer.flush();
}

}  // namespace fastamp
