// The optimizers' arithmetic, for host and device: float32 products, sums, quotients and roots,
// each rounded by itself, so that every backend gets the same bits. A rule turns a group's options
// and the count of steps into `Terms`, and `apply` updates one element with its states. A rule
// whose loop depends on options has a kind for each; `serves` says which groups are a kind's.
#pragma once

#include <cmath>
#include <cstdint>

#include "step/ops.h"
#include "support/macros.h"

namespace fastamp {

/// The optimizers whose update the core makes. AdamW is Adam with decoupled decay.
enum class Rule : std::uint8_t { kAdam, kSgd, kLion, kMuonMomentum, kMuonWrite };

/// Squares repeatedly: `pow` differs between C libraries.
FASTAMP_HD inline double power(double base, std::uint64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result = product(result, base);
    base = product(base, base);
  }
  return result;
}

FASTAMP_HD inline bool is_skipped(const UpdateSpec& spec) {
  return spec.found_inf != nullptr && *spec.found_inf != 0;
}

FASTAMP_HD inline float factor_of(const UpdateSpec& spec) {
  return spec.factor == nullptr ? 1.0F : *spec.factor;
}

/// Returns the number of a step, which is counted before the update; 0 where nothing is counted.
FASTAMP_HD inline float step_of(const float* count) { return count == nullptr ? 0.0F : *count; }

FASTAMP_HD inline float sign_of(const GroupOptions& group) {
  return group.maximize != 0 ? -1.0F : 1.0F;
}

/// Adds coupled weight decay to a gradient; `sign` is -1 with `maximize`.
FASTAMP_HD inline float decayed(float grad, float param, float sign, float decay) {
  grad *= sign;
  return decay != 0 ? grad + product(decay, param) : grad;
}

/// What a rule is unless it says otherwise. A lean optimizer's states in fewer bits change by a
/// hundredth in a step, and codes are 3 to 6 % apart: they are rounded randomly, or they would
/// never change.
struct AnyRule {
  static bool serves(const GroupOptions&) { return true; }
  static constexpr bool kIsLean = true;
  FASTAMP_HD static constexpr Format code_of(int) { return Format::kSigned8; }
  FASTAMP_HD static constexpr bool is_random(int) { return true; }
};

/// Interpolates from the nearer end, as torch.lerp does.
struct Interpolation {
  bool from_end;
  float weight;

  /// Of two weights whose sum is 1.
  FASTAMP_HD static Interpolation by(double of_end, double of_start) {
    const bool is_far = !(of_end < 0.5 && of_end > -0.5);
    return {is_far, static_cast<float>(is_far ? -of_start : of_end)};
  }

  FASTAMP_HD FASTAMP_INLINE float operator()(float start, float end) const {
    return (from_end ? end : start) + product(weight, end - start);
  }
};

/// torch.optim.Adam and AdamW without amsgrad: exp_avg and exp_avg_sq. The first changes by a tenth
/// in a step.
struct Adam : AnyRule {
  static constexpr Rule kRule = Rule::kAdam;
  static constexpr int kStates = 2;

  FASTAMP_HD static constexpr Format code_of(int s) {
    return s == 0 ? Format::kSigned8 : Format::kUnsigned8;
  }
  FASTAMP_HD static constexpr bool is_random(int s) { return s > 0; }

  struct Terms {
    Interpolation to_grad;  ///< of exp_avg
    float beta2;
    float weight2;
    float step_size;  ///< lr / (1 - beta1^t) * sqrt(1 - beta2^t)
    float eps;        ///< eps * sqrt(1 - beta2^t), which spares the second moment's correction
    float sign;
    float decay;
    float keep;  ///< multiplies the parameter: 1 - lr * weight_decay if decoupled, else 1
  };

  FASTAMP_HD static Terms terms(const GroupOptions& group, float step) {
    const auto t = static_cast<std::uint64_t>(step > 0 && step < 1e18F ? step : 0);
    const double kept = product(group.lr, group.weight_decay);
    const double root = sqrt(1 - power(group.beta2, t));
    return {Interpolation::by(1 - group.beta1, group.beta1),
            static_cast<float>(group.beta2),
            static_cast<float>(1 - group.beta2),
            static_cast<float>(product(group.lr / (1 - power(group.beta1, t)), root)),
            static_cast<float>(product(group.eps, root)),
            sign_of(group),
            group.decoupled != 0 ? 0.0F : static_cast<float>(group.weight_decay),
            group.decoupled != 0 ? static_cast<float>(1 - kept) : 1.0F};
  }

  FASTAMP_HD static void apply(const Terms& terms, float grad, float& param, float* states) {
    float& exp_avg = states[0];
    float& exp_avg_sq = states[1];
    param = product(param, terms.keep);
    grad = decayed(grad, param, terms.sign, terms.decay);
    exp_avg = terms.to_grad(exp_avg, grad);
    exp_avg_sq = product(exp_avg_sq, terms.beta2) + product(product(terms.weight2, grad), grad);
    param -= product(terms.step_size, exp_avg) / (sqrtf(exp_avg_sq) + terms.eps);
  }
};

/// torch.optim.SGD without dampening: momentum_buffer, if there is momentum.
template <bool kMomentum>
struct Sgd : AnyRule {
  static constexpr Rule kRule = Rule::kSgd;
  static constexpr int kStates = kMomentum ? 1 : 0;

  static bool serves(const GroupOptions& group) { return (group.momentum != 0) == kMomentum; }

  struct Terms {
    float lr;
    float momentum;
    bool nesterov;
    float sign;
    float decay;
  };

  FASTAMP_HD static Terms terms(const GroupOptions& group, float) {
    return {static_cast<float>(group.lr), static_cast<float>(group.momentum), group.nesterov != 0,
            sign_of(group), static_cast<float>(group.weight_decay)};
  }

  FASTAMP_HD static void apply(const Terms& terms, float grad, float& param, float* states) {
    grad = decayed(grad, param, terms.sign, terms.decay);
    if (kMomentum) {
      float& buffer = states[0];
      buffer = product(buffer, terms.momentum) + grad;
      grad = terms.nesterov ? grad + product(terms.momentum, buffer) : buffer;
    }
    param -= product(terms.lr, grad);
  }
};

/// Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms", program 1): exp_avg.
/// The parameter moves by the sign of an average of gradients, and its decay is decoupled.
struct Lion : AnyRule {
  static constexpr Rule kRule = Rule::kLion;
  static constexpr int kStates = 1;

  struct Terms {
    float lr;
    float beta1;
    float weight1;
    float beta2;
    float weight2;
    float sign;
    float keep;  ///< multiplies the parameter: 1 - lr * weight_decay
  };

  FASTAMP_HD static Terms terms(const GroupOptions& group, float) {
    return {static_cast<float>(group.lr),
            static_cast<float>(group.beta1),
            static_cast<float>(1 - group.beta1),
            static_cast<float>(group.beta2),
            static_cast<float>(1 - group.beta2),
            sign_of(group),
            static_cast<float>(1 - product(group.lr, group.weight_decay))};
  }

  FASTAMP_HD static void apply(const Terms& terms, float grad, float& param, float* states) {
    grad *= terms.sign;
    float& exp_avg = states[0];
    const float average = product(exp_avg, terms.beta1) + product(grad, terms.weight1);
    const float change = average > 0 ? terms.lr : average < 0 ? -terms.lr : average;  // 0, NaN
    param = product(param, terms.keep) - change;
    exp_avg = product(exp_avg, terms.beta2) + product(grad, terms.weight2);
  }
};

/// torch.optim.Muon before its products: momentum_buffer. The parameter is what will be multiplied,
/// and is only written.
struct MuonMomentum : AnyRule {
  static constexpr bool kIsLean = false;
  static constexpr Rule kRule = Rule::kMuonMomentum;
  static constexpr int kStates = 1;

  struct Terms {
    Interpolation to_grad;
    Interpolation to_buffer;
    bool nesterov;
  };

  FASTAMP_HD static Terms terms(const GroupOptions& group, float) {
    const double to_grad = 1 - group.momentum;
    return {Interpolation::by(to_grad, 1 - to_grad), Interpolation::by(group.momentum, to_grad),
            group.nesterov != 0};
  }

  FASTAMP_HD static void apply(const Terms& terms, float grad, float& direction, float* states) {
    float& buffer = states[0];
    buffer = terms.to_grad(buffer, grad);
    direction = terms.nesterov ? terms.to_buffer(grad, buffer) : buffer;
  }
};

/// torch.optim.Muon after its products, of which the gradient is the result.
struct MuonWrite : AnyRule {
  static constexpr bool kIsLean = false;
  static constexpr Rule kRule = Rule::kMuonWrite;
  static constexpr int kStates = 0;

  struct Terms {
    float step_size;
    float keep;  ///< multiplies the parameter: 1 - lr * weight_decay
  };

  FASTAMP_HD static Terms terms(const GroupOptions& group, float) {
    return {static_cast<float>(product(group.lr, group.lr_ratio)),
            static_cast<float>(1 - product(group.lr, group.weight_decay))};
  }

  FASTAMP_HD static void apply(const Terms& terms, float direction, float& param, float*) {
    param = product(param, terms.keep) - product(terms.step_size, direction);
  }
};

constexpr int kMaxOptions = 6;

/// A number or flag among a group's options, and its place; a pair, as betas, has two. With no
/// place torch steps unless it is 0.
struct Option {
  const char* name;
  double GroupOptions::* place = nullptr;
  double GroupOptions::* second = nullptr;
};

/// A state of a parameter, which it has if an option is set; null: always.
struct State {
  const char* name;
  const char* option = nullptr;
};

/// All of a rule but its arithmetic, for the core and for Python; names are torch's.
struct Declaration {
  Rule rule;
  const char* name;
  Option options[kMaxOptions];
  State states[kMaxStates];  ///< in the order in which `apply` takes them
  bool counts;               ///< whether "step" is a count of steps; a lean optimizer's always is
  bool as_grad;  ///< whether torch makes the states in the gradient's dtype, not the parameter's
};

using G = GroupOptions;
inline const Option kDecay{"weight_decay", &G::weight_decay};
inline const Option kMaximize{"maximize", &G::maximize};
inline const Option kBetas{"betas", &G::beta1, &G::beta2};
inline const Option kMomentum{"momentum", &G::momentum};
inline const Option kNesterov{"nesterov", &G::nesterov};
inline const Option kDecoupled{"decoupled_weight_decay", &G::decoupled};
inline const State kBuffer{"momentum_buffer"};
inline const Declaration kDeclarations[] = {
    {Rule::kAdam,
     "Adam",
     {kDecay, {"eps", &G::eps}, kBetas, kMaximize, {"amsgrad"}, kDecoupled},
     {{"exp_avg"}, {"exp_avg_sq"}},
     true,
     false},
    {Rule::kSgd,
     "SGD",
     {kDecay, kMomentum, {"dampening"}, kMaximize, kNesterov},
     {{"momentum_buffer", "momentum"}},
     false,
     true},
    {Rule::kLion, "Lion", {kDecay, kBetas, kMaximize}, {{"exp_avg"}}, true, false},
    {Rule::kMuonMomentum, "Muon, momentum", {kMomentum, kNesterov}, {kBuffer}, false, true},
    {Rule::kMuonWrite, "Muon, write", {kDecay, {"lr_ratio", &G::lr_ratio}}, {}, false, false},
};

/// Every kind of rule; a new one is added here.
template <typename Fn>
FASTAMP_INLINE void for_each_kind(Fn fn) {
  fn(Adam{});
  fn(Sgd<false>{});
  fn(Sgd<true>{});
  fn(Lion{});
  fn(MuonMomentum{});
  fn(MuonWrite{});
}

/// Calls fn(kind) with the kind that updates a group.
template <typename Fn>
FASTAMP_INLINE void visit_rule(Rule rule, const GroupOptions& group, Fn fn) {
  for_each_kind([&](auto kind) FASTAMP_INLINE_LAMBDA {
    using Kind = decltype(kind);
    if (Kind::kRule == rule && Kind::serves(group)) fn(kind);
  });
}

}  // namespace fastamp
