// Reads of memory that its owner may free meanwhile, or whose file another process may truncate.
#pragma once

#include "data/gather.h"

namespace fastamp {

/// Sets the handlers of SIGSEGV and SIGBUS, again if they were removed. Called before each job.
void keep_guard();

/// Returns gather(columns, job), or that memory of a column is lost. Then the copy was left in the
/// middle, without destructors: `gather` must own nothing and hold no lock.
GatherResult gather_guarded(const std::vector<Column>& columns, const GatherJob& job);

}  // namespace fastamp
