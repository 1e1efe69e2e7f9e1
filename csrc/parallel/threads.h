// Threads for the passes over memory, shared by every op of the CPU backend.
#pragma once

#include <cstdint>
#include <functional>

namespace fastamp {

/// Calls body(i) once for each i in [0, count), on at most num_threads threads, the caller's among
/// them, and returns when all calls have. body must not throw. Several callers may call at once.
/// Safe in a forked child.
void parallel_for(std::int64_t count, int num_threads,
                  const std::function<void(std::int64_t)>& body);

}  // namespace fastamp
