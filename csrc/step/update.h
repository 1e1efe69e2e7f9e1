// The plain data of an optimizer's update: its groups' options and the addresses of its tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor/view.h"

namespace fastamp {

enum class Rule : std::uint8_t;  ///< see rules.h

/// The options of one parameter group; those of other optimizers stay 0. Flags are 0 or 1.
struct GroupOptions {
  const float* lr_on_device;  ///< address of a learning rate on the tensors' device; null: `lr`
  double lr;
  double weight_decay;
  double eps;
  double beta1;
  double beta2;
  double momentum;
  double lr_ratio;   ///< multiplies the learning rate, but not the weight decay
  double decoupled;  ///< weight decay shrinks the parameter, rather than adding to the gradient
  double maximize;
  double nesterov;
};

constexpr int kMaxStates = 2;

/// A tensor whose values are kept in a format.
struct Stored {
  void* data;
  float* scales;  ///< of the blocks of codes
  Format format;
  bool is_random;  ///< whether values are rounded randomly, rather than to the nearest
};

/// One parameter with everything that its update reads and writes, all in the same order of memory.
struct ParameterView {
  std::int64_t numel;
  Stored param;
  Stored grad;
  Stored states[kMaxStates];  ///< those that the optimizer has, then null
  float* step;                ///< the count of steps; null where the optimizer keeps none
  std::int16_t* low;          ///< the lower 16 bits of exact bfloat16 weights; null: none are kept
  std::uint32_t row;          ///< elements of a row of the first dimension, for a lean optimizer
  std::uint32_t seed;         ///< of random rounding
  std::uint32_t group;

  bool has_codes() const { return is_coded(states[0].format); }
  bool has_noise() const {
    bool found = param.is_random;
    for (const Stored& state : states) found |= state.is_random;
    return found;
  }
  /// Whether all values are floats, rounded to the nearest.
  bool is_plain() const { return low == nullptr && !has_codes() && !has_noise(); }
};

struct UpdateList {
  Rule rule;
  std::vector<GroupOptions> groups;
  std::vector<ParameterView> parameters;

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
