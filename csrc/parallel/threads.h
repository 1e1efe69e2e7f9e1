// torch's own thread team, shared by every pass over memory: it is awake after the backward pass,
// and threads of our own would share the cores with its spinning workers.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace fastamp {

/// Calls work(data) on `num_threads` threads, the caller's among them, and returns when all calls
/// have. Calls it once, on the caller's thread, if the process has no OpenMP runtime and in a
/// forked child, which has none of the runtime's threads.
void run_team(int num_threads, void (*work)(void*), void* data);

/// Calls body(i) once for each i in [0, count), on at most `num_threads` threads. body must not
/// throw. Threads take one index at a time, so that a thread that is delayed takes fewer.
template <typename Body>
void parallel_for(std::int64_t count, int num_threads, const Body& body) {
  struct Job {
    const std::int64_t count;
    const Body& body;
    std::atomic<std::int64_t> next{0};

    static void work(void* data) {
      Job& job = *static_cast<Job*>(data);
      for (std::int64_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.count;)
        job.body(i);
    }
  };
  Job job{count, body};
  run_team(static_cast<int>(std::min<std::int64_t>(num_threads, count)), &Job::work, &job);
}

}  // namespace fastamp
