// Tables of tensors that are passed as a kernel's argument, so that nothing is copied to the device
// and a captured graph holds its own copy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "step/math.h"

namespace fastamp {

constexpr std::size_t kMaxArguments = 32764;  // bytes, of one kernel

/// As many entries as a launch can hold, and how many chunks they have together.
template <typename Entry, int kMax>
struct Table {
  Entry entries[kMax];
  std::uint32_t count;
  std::uint32_t num_chunks;
};

/// Calls use(table) for tables that hold entries 0 to count - 1 in order, each filled by
/// fill(index, table).
template <typename Entry, int kMax, typename Fill, typename Use>
void for_each_table(std::size_t count, const Fill& fill, const Use& use) {
  for (std::size_t next = 0; next < count;) {
    Table<Entry, kMax> table;
    table.count = 0;
    table.num_chunks = 0;
    for (; next < count && table.count < kMax; ++next) fill(next, table);
    use(table);
  }
}

/// Where a chunk lies: in which entry, and in which of its elements.
struct Place {
  std::uint32_t entry;
  std::int64_t start;
  int numel;
};

/// Returns the place of a chunk. Its entry is the last one that begins at or before it; entries
/// have the number of their first chunk and the elements of their last.
template <typename Entry>
__device__ Place find_place(const Entry* entries, std::uint32_t count, std::uint32_t num_chunks,
                            std::uint32_t chunk) {
  std::uint32_t low = 0;
  std::uint32_t high = count;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (entries[middle].first_chunk <= chunk ? low : high) = middle;
  }
  const std::uint32_t end = high < count ? entries[high].first_chunk : num_chunks;
  const auto start = static_cast<std::int64_t>(chunk - entries[low].first_chunk) * kChunk;
  const int numel = chunk + 1 == end ? static_cast<int>(entries[low].tail_numel) : int{kChunk};
  return {low, start, numel};
}

/// Gives an entry its chunks, behind those before it, and counts them in `num_chunks`.
template <typename Entry>
void place_entry(Entry& entry, std::int64_t numel, std::int64_t chunks, std::uint32_t& num_chunks) {
  entry.first_chunk = num_chunks;
  entry.tail_numel = static_cast<std::uint32_t>(numel - (chunks - 1) * kChunk) & 0x1ffffU;
  num_chunks += static_cast<std::uint32_t>(chunks);
}

}  // namespace fastamp
