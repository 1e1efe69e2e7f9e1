// Batches gathered ahead of their consumer.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "data/gather.h"

namespace fastamp {

/// Gathers batches on the threads of the process, in the order of submission, for one consumer. The
/// memory that jobs point to outlives the queue; that of columns should.
class GatherQueue {
 public:
  /// At most `num_threads` threads are started for it, fewer if the process has some: when a job is
  /// submitted that is worth one, and no other thread is idle.
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
  struct Pool;
  struct Shared;
  Shared& shared();

  std::unique_ptr<Shared> shared_;
};

}  // namespace fastamp
