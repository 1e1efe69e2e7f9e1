// Tables of tensors that are passed as a kernel's argument, so that nothing is copied to the device
// and a captured graph holds its own copy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "step/math.h"

namespace fastamp {

constexpr std::size_t kMaxArguments = 32764;  // bytes, of one kernel
// Bytes of a table: a launch copies all of it, so that short lists have a kernel of their own,
// whose arguments take 4 KB.
constexpr std::size_t kLongTable = 32696;
constexpr std::size_t kShortTable = 4032;

/// As many entries as a launch can hold, and how many chunks they have together.
template <typename Entry, std::size_t kBytes>
struct Table {
  static constexpr std::uint32_t kMax = kBytes / sizeof(Entry);
  Entry entries[kMax];
  std::uint32_t count;
  std::uint32_t num_chunks;
};

/// Calls use(table) for tables that hold entries 0 to count - 1 in order, each filled by
/// fill(index, table); once with an empty table if there are none.
template <typename Entry, typename Fill, typename Use>
void for_each_table(std::size_t count, const Fill& fill, const Use& use) {
  std::size_t next = 0;
  do {
    Table<Entry, kLongTable> table;
    table.count = 0;
    table.num_chunks = 0;
    for (; next < count && table.count < table.kMax; ++next) fill(next, table);
    Table<Entry, kShortTable> shorter;
    if (table.count > shorter.kMax) {
      use(table);
      continue;
    }
    std::copy_n(table.entries, table.count, shorter.entries);
    shorter.count = table.count;
    shorter.num_chunks = table.num_chunks;
    use(shorter);
  } while (next < count);
}

/// Where a chunk lies: in which entry, and in which of its elements.
struct Place {
  std::uint32_t entry;
  std::int64_t start;
  int numel;
};

/// Returns the place of a chunk of `size` elements. Its entry is the last one that begins at or
/// before it; entries have the number of their first chunk and the elements of their last.
template <typename Entry>
__device__ Place find_place(const Entry* entries, std::uint32_t count, std::uint32_t num_chunks,
                            std::uint32_t chunk, std::uint32_t size) {
  std::uint32_t low = 0;
  std::uint32_t high = count;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (entries[middle].first_chunk <= chunk ? low : high) = middle;
  }
  const std::uint32_t end = high < count ? entries[high].first_chunk : num_chunks;
  const auto start = static_cast<std::int64_t>(chunk - entries[low].first_chunk) * size;
  return {low, start, static_cast<int>(chunk + 1 == end ? entries[low].tail_numel : size)};
}

/// Gives an entry its chunks of `size` elements, one at least, behind those before it, and counts
/// them in `num_chunks`.
template <typename Entry>
void place_entry(Entry& entry, std::int64_t numel, std::int64_t size, std::uint32_t& num_chunks) {
  const std::int64_t chunks = numel > 0 ? (numel + size - 1) / size : 1;
  entry.first_chunk = num_chunks;
  entry.tail_numel = static_cast<std::uint32_t>(numel - (chunks - 1) * size) & 0x1ffffU;
  num_chunks += static_cast<std::uint32_t>(chunks);
}

}  // namespace fastamp
