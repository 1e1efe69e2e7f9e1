// A batch gathered from arrays in memory.
#pragma once

#include <cstdint>
#include <vector>

#include "data/augment.h"

namespace fastamp {

/// Memory that holds the bytes of a column from `begin` to `end`, where it has several.
struct Part {
  const char* data;
  std::int64_t begin;
  std::int64_t end;
};

/// An array whose rows become the rows of one tensor of the batch. Rows may overlap, and continue
/// in the next part.
struct Column {
  std::vector<Part> parts;  ///< at least one, end to end
  std::int64_t num_rows;
  std::int64_t row_stride;  ///< bytes from one row to the next
  std::int64_t row_nbytes;  ///< of the source
  int widened;              ///< bytes of an unsigned integer that becomes an int64; -4: int32's; 0:
                            ///< a plain copy
  Images images{};          ///< of rows that are augmented, which lie in one part
};

/// One batch: row indices[i] of every column goes to row i of that column's output.
struct GatherJob {
  const std::int64_t* indices;  ///< from -num_rows to num_rows - 1
  std::int64_t count;
  std::vector<char*> outputs;           ///< one for each column
  const std::uint64_t* keys = nullptr;  ///< of the samples, for columns that are augmented
};

struct GatherResult {
  double elapsed_s;
  std::int64_t bad_position;  ///< of the first index that is out of bounds, or -1
  std::int64_t num_rows;      ///< of the column that has no such row
  bool is_lost;               ///< whether memory of a column no longer exists
};

/// Bytes of all outputs of a job.
std::int64_t nbytes_of(const std::vector<Column>& columns, const GatherJob& job);

/// Copies the rows of a job, until an index is out of bounds.
GatherResult gather(const std::vector<Column>& columns, const GatherJob& job);

}  // namespace fastamp
