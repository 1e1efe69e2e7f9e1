// Batches of long rows, gathered from arrays in memory.
#pragma once

#include <cstdint>

namespace fastamp {

/// An array whose rows become the rows of a batch.
struct Column {
  const char* data;
  std::int64_t num_rows;
  std::int64_t row_stride;  ///< bytes from one row to the next: rows may overlap
  std::int64_t row_nbytes;
  int widened = 0;  ///< bytes of integers that become int64, negative if signed; 0 copies rows
};

/// Copies row rows[i] to row i of `output`, on at most `num_threads` threads: past the caches, or
/// as int64. Returns the position of the first row that does not exist, or -1; nothing is copied
/// then.
std::int64_t gather(const Column& column, const std::int64_t* rows, std::int64_t count,
                    char* output, int num_threads);

}  // namespace fastamp
