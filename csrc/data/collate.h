// Stacks samples into a batch, in host memory.
#pragma once

#include <cstdint>
#include <vector>

namespace fastamp {

/// Where the rows of a batch come from and how long they become. A row is contiguous.
struct StackSpec {
  std::vector<const void*> rows;
  std::vector<std::int64_t> row_shape;  ///< of one row of the batch
  std::vector<std::int64_t> shapes;     ///< of each row, one after the other; none: all row_shape
  std::int64_t itemsize = 0;
  const void* pad = nullptr;  ///< the element that fills the end of shorter dimensions
};

/// Bytes of one row of the batch.
std::int64_t row_nbytes(const StackSpec& spec);

/// Copies the rows one after the other to `out`; every byte of it is written once. On one thread:
/// samples that Python makes are rarely more than the caches hold, and on a busy machine a team
/// waits for the thread that the system has put aside.
void stack_rows(const StackSpec& spec, void* out);

}  // namespace fastamp
