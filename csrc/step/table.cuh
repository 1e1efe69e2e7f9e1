// Tables of tensors that are passed as a kernel's argument, so that nothing is copied to the device
// and a captured graph holds its own copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace fastamp {

constexpr std::size_t kMaxArguments = 32764;  // bytes, of one kernel

/// Entries, each with the number of its first chunk, and how many chunks they have together.
template <typename Entry, int kMax>
struct Table {
  static constexpr int kSize = kMax;
  Entry entries[kMax];
  std::uint32_t count;
  std::uint32_t num_chunks;
};

/// Sizes of the tables of for_each_table: kFew entries hold most programs' tensors in less than 4
/// KB, kLargest are as many as a launch can hold.
constexpr int kFew = 240;
template <int kLargest>
using TableSizes = std::integer_sequence<int, kFew, kLargest>;

/// Returns the index of the entry that a chunk belongs to: the last that begins at or before it.
template <typename Entry>
__device__ std::uint32_t find_entry(const Entry* entries, std::uint32_t count,
                                    std::uint32_t chunk) {
  std::uint32_t low = 0;
  std::uint32_t high = count;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (entries[middle].first_chunk <= chunk ? low : high) = middle;
  }
  return low;
}

/// Calls use(table) for tables that hold entries 0 to count - 1 in order, each filled by
/// fill(index, &table). One table holds up to kLargest entries; a smaller size is used if it is
/// enough, since a launch copies the whole table.
template <typename Entry, int kLargest, typename Fill, typename Use>
void for_each_table(std::size_t count, const Fill& fill, const Use& use) {
  std::size_t next = 0;
  const auto use_table = [&](auto size) {
    Table<Entry, size> table;
    table.count = 0;
    table.num_chunks = 0;
    for (; next < count && table.count < size; ++next) fill(next, &table);
    use(table);
  };
  while (next < count) {
    if (count - next <= kFew)
      use_table(std::integral_constant<std::uint32_t, kFew>{});
    else
      use_table(std::integral_constant<std::uint32_t, kLargest>{});
  }
}

}  // namespace fastamp
