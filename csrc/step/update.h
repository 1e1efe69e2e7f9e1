// The plain data of an optimizer's update: its groups' options and the addresses of its tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor/view.h"

namespace fastamp {

enum class Rule : std::uint8_t;  ///< see rules.h

/// The options of one parameter group; those of other optimizers stay 0.
struct GroupOptions {
  const float* lr_on_device;  ///< address of a learning rate on the tensors' device; null: `lr`
  double lr;
  double weight_decay;
  double eps;
  double beta1;
  double beta2;
  double momentum;
  double lr_ratio;  ///< multiplies the learning rate, but not the weight decay
  bool decoupled;   ///< weight decay shrinks the parameter, rather than adding to the gradient
  bool maximize;
  bool amsgrad;
  bool nesterov;
};

constexpr int kMaxStates = 3;

/// One parameter with everything that its update reads and writes, all in the same order of memory.
struct ParameterView {
  std::int64_t numel;
  void* param;
  void* grad;
  void* states[kMaxStates];  ///< those that the optimizer has, then null
  float* step;               ///< the count of steps; null where the optimizer keeps none
  std::uint32_t group;
  DType param_dtype;
  DType grad_dtype;
  DType state_dtype;
};

/// How fastamp.AdamW keeps a parameter and its moments; see step/formats.h. Moments without scales
/// are floats; a 16-bit parameter without a lower half is rounded randomly.
struct Kept {
  std::int16_t* low;
  float* scales[2];
  std::int64_t row;  ///< elements of a row of the first dimension, within which blocks lie
  std::uint32_t seed;
};

struct UpdateList {
  Rule rule;
  std::vector<GroupOptions> groups;
  std::vector<ParameterView> parameters;
  std::vector<Kept> kept;  ///< of all parameters, or of none

  /// Counts a step, on the host.
  void count_step() const {
    for (const ParameterView& view : parameters)
      if (view.step != nullptr) *view.step += 1;
  }
};

/// How one update is made. The pointers are on the tensors' device.
struct UpdateSpec {
  const float* factor;     ///< multiplies the gradients first; null is 1
  const float* found_inf;  ///< 1 writes nothing at all; null is 0
  bool write_grads;        ///< whether the multiplied gradients are written back
  bool counts;             ///< whether to count the step first: grad_stats has not
};

}  // namespace fastamp
