// Batches gathered from arrays in memory, ahead of their consumer: the interface that the bindings
// see.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace fastamp {

/// How the elements of a row are written.
enum class Cast : std::uint8_t {
  kNone,          ///< as they are
  kUInt8ToInt64,  ///< the others are widened
  kUInt16ToInt64,
  kInt32ToInt64,
};

/// An array whose rows become the rows of one tensor of the batch. Rows may overlap.
struct Column {
  const char* data;
  std::int64_t num_rows;
  std::int64_t row_stride;  ///< bytes from one row to the next
  std::int64_t row_nbytes;  ///< of the source
  Cast cast;
};

/// One batch: row indices[i] of every column goes to row i of that column's output.
struct GatherJob {
  const std::int64_t* indices;  ///< from -num_rows to num_rows - 1
  std::int64_t count;
  std::vector<char*> outputs;  ///< one for each column
};

struct GatherResult {
  double elapsed_s;
  std::int64_t bad_position;  ///< of the first index that is out of bounds, or -1
  std::int64_t bad_column;    ///< whose rows do not reach that index
};

/// Gathers batches on threads of its own in the order of submission. For one consumer; the memory
/// that jobs and columns point to outlives them.
class GatherQueue {
 public:
  virtual ~GatherQueue() = default;  ///< Waits for the jobs that run and forgets the others.

  /// Adds a job; at most `depth` may be under way.
  virtual void submit(GatherJob job) = 0;

  /// Returns the result of the oldest job, or nothing after `timeout_s`. Until it is done, jobs
  /// that no thread has begun are done here.
  virtual std::optional<GatherResult> wait(double timeout_s) = 0;
};

std::unique_ptr<GatherQueue> make_gather_queue(std::vector<Column> columns, int depth,
                                               int num_threads);

}  // namespace fastamp
