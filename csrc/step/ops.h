// The op table: one row per op, filled once by every backend that the compiled module holds.
#pragma once

#include "step/types.h"
#include "step/update.h"

namespace fastamp {

struct OpTable {
  /// Reads every element once. `work` has 1 + (chunks of all tensors) slots on the tensors' device;
  /// work[0] becomes the float64 sum of squares in the order of step/math.h; the rest is scratch.
  /// Unless found_inf becomes 1, counts the step of the update that follows, if there is one.
  void (*grad_stats)(const TensorList& tensors, const ClipSpec& clip, double* work,
                     GradStats* stats, const UpdateList* counted, const Launch& launch);

  /// Multiplies every element by *factor, rounded once to its dtype; *factor == 1 writes nothing.
  void (*rescale)(const TensorList& tensors, const float* factor, const Launch& launch);

  /// Updates parameters and states in place, in one pass; see step/rules.h.
  void (*update)(const UpdateList& list, const UpdateSpec& spec, const Launch& launch);
};

const OpTable& cpu_ops();
void update_on_cpu(const UpdateList& list, const UpdateSpec& spec, const Launch& launch);
void update_on_cuda(const UpdateList& list, const UpdateSpec& spec, const Launch& launch);

/// Without CUDA code in the module every entry throws (no_cuda.cpp).
const OpTable& cuda_ops();
bool built_with_cuda();

/// Throws, with the reason and a remedy, where the kernels cannot run on a CUDA device.
void check_device(int device_index);

}  // namespace fastamp
