// The symbols of the library that holds the emulated kernels.
#include <cuda_runtime.h>

#include <cstddef>

#include "grid.h"
#include "step/ops.h"

/// Returns the op table of the kernels, and the size that it has here.
extern "C" const fastamp::OpTable* fastamp_emulated_ops(std::size_t* size) {
  *size = sizeof(fastamp::OpTable);
  return &fastamp::cuda_ops();
}

/// Returns how many kernels were launched so far.
extern "C" unsigned fastamp_emulated_launches() { return emulated_launches; }
