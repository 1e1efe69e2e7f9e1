// Finds torch's OpenMP runtime and runs loops on its thread team.
#include "parallel/threads.h"

#include <dlfcn.h>
#include <unistd.h>

namespace fastamp {
namespace {

/// The entry that compilers call for `#pragma omp parallel`, in libgomp's ABI, which LLVM's and
/// Intel's runtimes offer too.
using OpenMpParallel = void (*)(void (*body)(void*), void* data, unsigned num_threads,
                                unsigned flags);

const pid_t owner_pid = getpid();  // a forked child has none of its threads

}  // namespace

void run_team(int num_threads, void (*work)(void*), void* data) {
  if (num_threads <= 1 || owner_pid != getpid()) return work(data);
  // The runtime that torch has loaded.
  static const auto openmp = reinterpret_cast<OpenMpParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  if (openmp == nullptr) return work(data);
  openmp(work, data, static_cast<unsigned>(num_threads), 0);
}

}  // namespace fastamp
