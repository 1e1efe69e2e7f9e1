// The plain data that crosses the op table, beside the tensors.
#pragma once

#include <cstdint>

#include "tensor/view.h"

namespace fastamp {

/// How gradients are to be unscaled and clipped. The pointers are on the tensors' device.
struct ClipSpec {
  const float* scale;  ///< loss scale, or nullptr for 1
  bool clip;           ///< whether max_norm applies
  bool only_finite;    ///< leave the clip out where found_inf is 1, so that inf does not become NaN
  float max_norm;
  const float* before;  ///< found_inf of an earlier read, which still counts, or nullptr
  float* skipped;       ///< counts the steps with found_inf, or nullptr
};

/// The statistics of one read of the gradients: consecutive floats on the tensors' device.
struct GradStats {
  float norm;       ///< of the unscaled gradients
  float found_inf;  ///< 1 if any element is inf or NaN, or an earlier read found one, else 0
  float clip_coef;  ///< min(1, max_norm / (norm + 1e-6))
  float factor;     ///< clip_coef / scale: multiply the gradients by this
  float scale;      ///< the loss scale at the time of the read
};

/// Where an op runs.
struct Launch {
  int num_threads;   ///< CPU: the caller's thread included
  int device_index;  ///< CUDA
  void* stream;      ///< CUDA: a cudaStream_t
};

}  // namespace fastamp
