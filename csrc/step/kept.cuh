// The GPU's update of fastamp.AdamW, kept.cu.
#pragma once

#include <cuda_runtime.h>

#include "step/update.h"

namespace fastamp {

void launch_kept(const UpdateList& list, const UpdateSpec& spec, cudaStream_t stream);

/// Throws unless the current device has code for it.
void check_kept_kernel();

}  // namespace fastamp
