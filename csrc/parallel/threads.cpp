// See threads.h.
#include "parallel/threads.h"

#include <dlfcn.h>
#include <unistd.h>

namespace fastamp {
namespace {

/// The entry that compilers call for `#pragma omp parallel`, in libgomp's ABI, which LLVM's and
/// Intel's runtimes offer too.
using OpenMpParallel = void (*)(void (*body)(void*), void* data, unsigned num_threads,
                                unsigned flags);

/// Finds the OpenMP runtime that torch has loaded. A forked child has none of its threads.
OpenMpParallel find_openmp() {
  static const pid_t owner_pid = getpid();
  static const auto found = reinterpret_cast<OpenMpParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return owner_pid == getpid() ? found : nullptr;
}

}  // namespace

void run_team(int num_threads, void (*work)(void*), void* data) {
  const OpenMpParallel openmp = find_openmp();
  if (num_threads <= 1 || openmp == nullptr) return work(data);
  openmp(work, data, static_cast<unsigned>(num_threads), 0);
}

}  // namespace fastamp
