// The symbols of the library that holds the emulated kernels.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <thread>

#include "grid.h"
#include "step/ops.h"

/// Returns the op table of the kernels, and the size that it has here.
extern "C" const fastamp::OpTable* fastamp_emulated_ops(std::size_t* size) {
  *size = sizeof(fastamp::OpTable);
  return fastamp::cuda_ops();
}

/// Returns how many kernels were launched so far, their blocks, and the bytes of the last one's
/// arguments.
extern "C" void fastamp_emulated_launches(unsigned found[3]) {
  found[0] = emulated_launches;
  found[1] = emulated_blocks;
  found[2] = emulated_arguments;
}

/// Runs an op for tensors on `device` in a new thread, which sets the device `own` before, unless
/// it is negative. Returns the thread's device afterwards, and which devices have a context.
extern "C" int fastamp_emulated_device(int own, int device, bool has_context[2]) {
  using namespace fastamp;
  int after = 0;
  emulate::has_context[0] = emulate::has_context[1] = false;
  std::thread([&] {
    if (own >= 0) static_cast<void>(cudaSetDevice(own));
    cuda_ops()->rescale({}, nullptr, {1, device, nullptr});
    static_cast<void>(cudaGetDevice(&after));
  }).join();
  std::copy_n(emulate::has_context, 2, has_context);
  return after;
}
