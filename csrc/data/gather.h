// Batches gathered from arrays in memory, ahead of their consumer.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "data/augment.h"

namespace fastamp {

/// Memory that holds the bytes of a column from `begin` to `end`, where it has several.
struct Part {
  const char* data;
  std::int64_t begin;
  std::int64_t end;
};

/// An array whose rows become the rows of one tensor of the batch. Rows may overlap, and go on in
/// the next part.
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
  bool is_lost;               ///< whether memory of a column is no longer there
};

/// Gathers batches on threads of its own, in the order of submission, for one consumer. The memory
/// that jobs point to outlives the queue; that of columns should.
class GatherQueue {
 public:
  GatherQueue(std::vector<Column> columns, int depth, int num_threads);
  ~GatherQueue();  ///< Waits for the jobs that run and drops the others.

  /// Adds a job; at most `depth` may be under way.
  void submit(GatherJob job);

  /// Says whether the oldest job is done, or so small that no thread is woken for it.
  bool is_ready();

  /// Returns the result of the oldest job, or nothing after `timeout_s`. Until it is done, the
  /// caller does jobs that no thread has started.
  std::optional<GatherResult> wait(double timeout_s);

 private:
  struct Shared;
  Shared& shared();

  std::unique_ptr<Shared> shared_;
};

}  // namespace fastamp
