// The op table, which each backend fills, and the plain data that crosses it: clips, statistics, an
// optimizer's options and the addresses of its tensors.
#pragma once

#include <cstdint>
#include <vector>

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
  bool has_noise() const { return param.is_random || states[0].is_random || states[1].is_random; }
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

/// Returns null without CUDA code in the module (no_cuda.cpp).
const OpTable* cuda_ops();

/// Throws, with the reason and a remedy, where the kernels cannot run on a CUDA device.
void check_device(int device_index);

}  // namespace fastamp
