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

// Bytes of a table. A launch copies all of it, so that short lists have a kernel of their own,
// whose arguments take 4 KB; more than 32,764 are too many.
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

/// Calls use(table) for tables with all entries that fill(add) adds; also with an empty one, if it
/// is asked for and there are none. `add` takes an entry, its elements, which make one chunk at
/// least, and the options of its group.
template <typename Entry, typename Fill, typename Use>
void for_each_table(std::int64_t chunk, const Fill& fill, const Use& use, bool also_empty = false) {
  std::vector<Entry> entries;
  std::vector<GroupOptions> groups;  // of the entries, in their order
  const GroupOptions* last = nullptr;
  std::uint32_t num_chunks = 0;
  const auto nbytes = [&] {
    return entries.size() * sizeof(Entry) + groups.size() * sizeof(GroupOptions);
  };
  const auto use_table = [&](auto size) {
    Table<Entry, decltype(size)::value> table;
    const auto copy = [](const auto& from, unsigned char* to) {
      return std::copy_n(reinterpret_cast<const unsigned char*>(from.data()),
                         from.size() * sizeof(from[0]), to);
    };
    copy(groups, copy(entries, table.room));
    table.count = static_cast<std::uint32_t>(entries.size());
    table.num_chunks = num_chunks;
    table.chunk = static_cast<std::uint32_t>(chunk);
    use(table);
  };
  const auto flush = [&] {
    if (nbytes() <= kShortTable)
      use_table(std::integral_constant<std::size_t, kShortTable>());
    else
      use_table(std::integral_constant<std::size_t, kLongTable>());
    entries.clear();
    groups.clear();
    num_chunks = 0;
  };
  fill([&](Entry entry, std::int64_t numel = 0, const GroupOptions* group = nullptr) {
    if (nbytes() + sizeof(Entry) + sizeof(GroupOptions) > kLongTable) flush();
    if constexpr (!std::is_pointer_v<Entry>) {
      if (group != nullptr && (groups.empty() || group != last)) groups.push_back(*group);
      last = group;
      const std::int64_t chunks = std::max<std::int64_t>(1, (numel + chunk - 1) / chunk);
      entry.first_chunk = num_chunks;
      entry.tail_numel = static_cast<std::uint32_t>(numel - (chunks - 1) * chunk) & 0x1ffffU;
      entry.group = static_cast<std::uint32_t>(groups.size() - 1) & 0x1ffU;
      num_chunks += static_cast<std::uint32_t>(chunks);
    }
    entries.push_back(entry);
  });
  if (!entries.empty() || also_empty) flush();
}

}  // namespace fastamp
