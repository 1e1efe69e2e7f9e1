// How a grid of threads runs on the host: fibers.cpp runs the threads of a block one at a time,
// threads.cpp at once, for the thread sanitizer. Blocks run one after the other, one grid at a
// time.
#pragma once

#include <cstdint>

namespace fastamp::emulate {

constexpr unsigned kWarp = 32;
constexpr unsigned kMaxThreads = 1024;  // of a block

struct Index {
  unsigned x = 1, y = 1, z = 1;
};

/// Calls thread(data) once for every thread. Returns false, and leaves the rest of the grid undone,
/// if threads wait at a barrier that others never reach. An exited thread is not waited for.
bool run_grid(unsigned blocks, unsigned threads, void (*thread)(const void*), const void* data);

/// Waits for all threads of the block.
void wait_for_block();

/// Gives `bits` to the warp and returns what its thread `source` gave; all 32 threads must call.
std::uint64_t exchange(std::uint64_t bits, unsigned source);

}  // namespace fastamp::emulate

// The indices of the running thread; grids have one dimension.
inline thread_local fastamp::emulate::Index threadIdx, blockIdx, blockDim, gridDim;
