// The copies of rows.
#include "data/gather.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "support/macros.h"

namespace fastamp {
namespace {

// Rows lie anywhere, so that the processor cannot predict the next ones: they are prefetched into
// the second-level cache while others are copied, more of them if they are short. In a long row the
// processor's own prefetcher soon takes over.
constexpr std::int64_t rows_ahead(std::int64_t row_nbytes) { return row_nbytes < 1024 ? 8 : 2; }
constexpr std::int64_t kPrefetchBytes = 4096;
constexpr std::int64_t kLine = 64;

// Batches from this size on evict each other from the caches before they are read. Their long rows
// are written past the caches, which saves reading the memory that is overwritten.
constexpr std::int64_t kStreamBytes = 4 << 20;
typedef long long Block __attribute__((vector_size(16), may_alias));

void prefetch(const char* line) { __builtin_prefetch(line, 0, 2); }

FASTAMP_INLINE void prefetch_row(const char* row, std::int64_t nbytes) {
  for (std::int64_t i = 0; i < std::min(nbytes, kPrefetchBytes); i += kLine) prefetch(row + i);
}

FASTAMP_SIMD_CLONES void copy(const char* source, std::int64_t nbytes, const char* ahead,
                              char* output) {
  std::int64_t i = 0;
  for (; i + kLine <= std::min(nbytes, kPrefetchBytes); i += kLine) {
    prefetch(ahead + i);
    std::memcpy(output + i, source + i, kLine);
  }
  std::memcpy(output + i, source + i, static_cast<std::size_t>(nbytes - i));
}

void stream(const char* source, std::int64_t nbytes, const char*, char* output) {
  constexpr std::int64_t kBlock = sizeof(Block);
  std::int64_t i = -reinterpret_cast<std::intptr_t>(output) & (kBlock - 1);
  std::memcpy(output, source, static_cast<std::size_t>(i));
  for (; i + kLine <= nbytes; i += kLine) {
    Block line[kLine / kBlock];
    std::memcpy(line, source + i, kLine);
    auto* to = reinterpret_cast<Block*>(output + i);
    for (const Block block : line) FASTAMP_STREAM(to++, block);
  }
  std::memcpy(output + i, source + i, static_cast<std::size_t>(nbytes - i));
}

template <typename T>
FASTAMP_INLINE void widen(const char* source, std::int64_t nbytes, const char* ahead,
                          char* output) {
  prefetch_row(ahead, nbytes);
  auto* to = reinterpret_cast<std::int64_t*>(output);
  const std::int64_t numel = nbytes / static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t i = 0; i < numel; ++i) {
    T token;  // at any address: a file's tokens may begin at an odd one
    std::memcpy(&token, source + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    to[i] = token;
  }
}

FASTAMP_SIMD_CLONES void widen_uint8(const char* source, std::int64_t nbytes, const char* ahead,
                                     char* output) {
  widen<std::uint8_t>(source, nbytes, ahead, output);
}

FASTAMP_SIMD_CLONES void widen_uint16(const char* source, std::int64_t nbytes, const char* ahead,
                                      char* output) {
  widen<std::uint16_t>(source, nbytes, ahead, output);
}

FASTAMP_SIMD_CLONES void widen_uint32(const char* source, std::int64_t nbytes, const char* ahead,
                                      char* output) {
  widen<std::uint32_t>(source, nbytes, ahead, output);
}

FASTAMP_SIMD_CLONES void widen_int32(const char* source, std::int64_t nbytes, const char* ahead,
                                     char* output) {
  widen<std::int32_t>(source, nbytes, ahead, output);
}

std::int64_t output_nbytes(const Column& column) {
  if (column.images.num_steps > 0) return result_nbytes(column.images);
  return column.widened == 0 ? column.row_nbytes : column.row_nbytes / std::abs(column.widened) * 8;
}

/// Copies `nbytes` from a source to an output; `ahead` is a row that comes soon.
using CopyRow = void (*)(const char* source, std::int64_t nbytes, const char* ahead, char* output);

CopyRow copier_of(const Column& column, bool is_large) {
  switch (column.widened) {
    case 1:
      return widen_uint8;
    case 2:
      return widen_uint16;
    case 4:
      return widen_uint32;
    case -4:
      return widen_int32;
    default:
      return is_large && column.row_nbytes >= kPrefetchBytes ? stream : copy;
  }
}

/// Returns the row that an index means, counted from the end where it is negative; -1 if none.
std::int64_t row_of(const Column& column, std::int64_t index) {
  const std::int64_t row = index < 0 ? index + column.num_rows : index;
  return row < column.num_rows ? std::max<std::int64_t>(row, -1) : -1;
}

/// Returns the part that holds a byte of the column.
const Part& part_of(const Column& column, std::int64_t place) {
  const auto is_before = [](std::int64_t p, const Part& part) { return p < part.begin; };
  const auto& parts = column.parts;
  // Most parts of a table have one size, so that the guess is right, or nearly.
  const double share = static_cast<double>(place) / static_cast<double>(parts.back().end);
  auto guess = static_cast<std::size_t>(share * static_cast<double>(parts.size()));
  guess = std::min(guess, parts.size() - 1);
  if (guess > 0 && place < parts[guess].begin) --guess;
  if (parts[guess].begin <= place && place < parts[guess].end) return parts[guess];
  return *std::prev(std::upper_bound(parts.begin(), parts.end(), place, is_before));
}

/// Copies a row that may lie in several parts.
void copy_parts(const Column& column, std::int64_t row, std::int64_t next, CopyRow copy_row,
                char* output) {
  const std::int64_t growth = output_nbytes(column) / column.row_nbytes;
  const std::int64_t soon = next * column.row_stride;
  const Part& ahead = part_of(column, soon);
  std::int64_t place = row * column.row_stride;
  const std::int64_t end = place + column.row_nbytes;
  while (place < end) {
    const Part& part = part_of(column, place);
    const std::int64_t nbytes = std::min(end, part.end) - place;
    copy_row(part.data + (place - part.begin), nbytes, ahead.data + (soon - ahead.begin), output);
    place += nbytes;
    output += nbytes * growth;
  }
}

}  // namespace

std::int64_t nbytes_of(const std::vector<Column>& columns, const GatherJob& job) {
  std::int64_t row_nbytes = 0;
  for (const Column& column : columns) row_nbytes += output_nbytes(column);
  return job.count * row_nbytes;
}

GatherResult gather(const std::vector<Column>& columns, const GatherJob& job) {
  const bool is_large = nbytes_of(columns, job) >= kStreamBytes;
  for (std::size_t c = 0; c < columns.size(); ++c) {
    const Column& column = columns[c];
    const std::int64_t out_nbytes = output_nbytes(column);
    const CopyRow copy_row = copier_of(column, is_large);
    const char* data = column.parts.front().data;
    const bool is_whole = column.parts.size() == 1;
    const std::int64_t ahead_by = rows_ahead(column.row_nbytes);
    for (std::int64_t i = 0; i < job.count; ++i) {
      const std::int64_t row = row_of(column, job.indices[i]);
      if (row < 0) return {0, i, column.num_rows, false};
      if (out_nbytes == 0) continue;
      const std::int64_t next = std::max<std::int64_t>(
          row_of(column, job.indices[std::min(i + ahead_by, job.count - 1)]), 0);
      const char* source = data + row * column.row_stride;
      const char* ahead = data + next * column.row_stride;
      char* output = job.outputs[c] + i * out_nbytes;
      if (!is_whole) {
        copy_parts(column, row, next, copy_row, output);
      } else if (column.images.num_steps == 0) {
        copy_row(source, column.row_nbytes, ahead, output);
      } else {
        prefetch_row(ahead, column.row_nbytes);
        augment(column.images, job.keys[i], source, output);
      }
    }
  }
  if (is_large) FASTAMP_STREAM_END();
  return {0, -1, 0, false};
}

}  // namespace fastamp
