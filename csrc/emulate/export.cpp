// The one symbol of the library that holds the emulated kernels.
#include <cstddef>

#include "step/ops.h"

/// Returns the op table of the kernels, and the size that it has here.
extern "C" const fastamp::OpTable* fastamp_emulated_ops(std::size_t* size) {
  *size = sizeof(fastamp::OpTable);
  return &fastamp::cuda_ops();
}
