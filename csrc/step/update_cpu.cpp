// The CPU's update: one pass over parameters, gradients and states, all groups and dtypes together.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "step/chunks.h"
#include "step/convert.h"
#include "step/math.h"
#include "step/ops.h"
#include "step/rules.h"

namespace fastamp {
namespace {

// 16-bit tensors are updated in float32, in blocks that stay in the first-level cache.
constexpr std::int64_t kBlock = 512;
constexpr int kMaxTensors = 2 + kMaxStates;  // of one parameter, its gradient and itself included
constexpr std::size_t kPrefetchChunks = 2;   // fewer than for a norm: updates take longer

/// Converts elements of 16 bits to float32.
FASTAMP_SIMD_CLONES void widen(const void* from, DType dtype, std::int64_t numel, float* to) {
  visit_host_dtype(dtype, [&](auto tag) FASTAMP_INLINE_LAMBDA {
    const auto* elements = static_cast<const decltype(tag)*>(from);
    for (std::int64_t i = 0; i < numel; ++i) to[i] = to_float(elements[i]);
  });
}

FASTAMP_SIMD_CLONES void narrow(const float* from, std::int64_t numel, DType dtype, void* to) {
  visit_host_dtype(dtype, [&](auto tag) FASTAMP_INLINE_LAMBDA {
    auto* elements = static_cast<decltype(tag)*>(to);
    for (std::int64_t i = 0; i < numel; ++i) from_float(from[i], &elements[i]);
  });
}

/// One tensor's elements as float32: its own memory, or a buffer with copies.
struct Floats {
  void* data;
  DType dtype;
  float* values;

  Floats(void* tensor, DType type, std::int64_t start, std::int64_t numel, float* buffer)
      : data(static_cast<char*>(tensor) + start * size_of(type)), dtype(type), values(buffer) {
    if (dtype == DType::kFloat32)
      values = static_cast<float*>(data);
    else
      widen(data, dtype, numel, values);
  }

  void write(std::int64_t numel) const {
    if (dtype != DType::kFloat32) narrow(values, numel, dtype, data);
  }
};

/// The loop over elements.
template <typename Kind, bool kWriteGrads>
FASTAMP_INLINE void update_floats(const typename Kind::Terms& terms, float factor,
                                  std::int64_t numel, float* __restrict__ param,
                                  float* __restrict__ grad, float* __restrict__ state0,
                                  float* __restrict__ state1, float* __restrict__ state2) {
  for (std::int64_t i = 0; i < numel; ++i) {
    const float g = product(grad[i], factor);
    if (kWriteGrads) grad[i] = g;
    float states[kMaxStates] = {Kind::kStates > 0 ? state0[i] : 0,
                                Kind::kStates > 1 ? state1[i] : 0,
                                Kind::kStates > 2 ? state2[i] : 0};
    float p = param[i];
    Kind::apply(terms, g, p, states);
    param[i] = p;
    if (Kind::kStates > 0) state0[i] = states[0];
    if (Kind::kStates > 1) state1[i] = states[1];
    if (Kind::kStates > 2) state2[i] = states[2];
  }
}

template <typename Kind, bool kWriteGrads>
FASTAMP_INLINE void update_chunk(const typename Kind::Terms& terms, float factor,
                                 const ParameterView& view, std::int64_t start,
                                 std::int64_t numel) {
  const bool is_wide = view.param_dtype == DType::kFloat32 && view.grad_dtype == DType::kFloat32 &&
                       (Kind::kStates == 0 || view.state_dtype == DType::kFloat32);
  const std::int64_t step = is_wide ? numel : kBlock;
  alignas(64) float buffers[kMaxTensors][kBlock];
  for (const std::int64_t end = start + numel; start < end; start += step) {
    const std::int64_t count = std::min(step, end - start);
    const Floats param(view.param, view.param_dtype, start, count, buffers[0]);
    const Floats grad(view.grad, view.grad_dtype, start, count, buffers[1]);
    const auto state = [&](int s) FASTAMP_INLINE_LAMBDA {
      void* const data = s < Kind::kStates ? view.states[s] : nullptr;
      const DType dtype = data == nullptr ? DType::kFloat32 : view.state_dtype;
      return Floats(data, dtype, data == nullptr ? 0 : start, count, buffers[2 + s]);
    };
    const Floats states[kMaxStates] = {state(0), state(1), state(2)};
    update_floats<Kind, kWriteGrads>(terms, factor, count, param.values, grad.values,
                                     states[0].values, states[1].values, states[2].values);
    if (is_wide) continue;
    param.write(count);
    if (kWriteGrads) grad.write(count);
    for (int s = 0; s < Kind::kStates; ++s) states[s].write(count);
  }
}

void prefetch(const ParameterView& view) {
  __builtin_prefetch(view.param);
  __builtin_prefetch(view.grad);
  for (const void* state : view.states) __builtin_prefetch(state);
}

/// Updates chunks whose parameters have the same options and step, and so the same terms, which
/// take as long as a hundred elements.
FASTAMP_SIMD_CLONES void update(const UpdateList& list, const Chunks& chunks, std::size_t begin,
                                std::size_t end, float factor, bool write_grads) {
  const ParameterView& first = list.parameters[chunks.all[begin].tensor];
  const GroupOptions& group = list.groups[first.group];
  visit_rule(list.rule, group, [&](auto kind) FASTAMP_INLINE_LAMBDA {
    using Kind = decltype(kind);
    const auto terms = Kind::terms(group, step_after(first.step));
    for (std::size_t i = begin; i < end; ++i) {
      prefetch(list.parameters[chunks.at_most(i + kPrefetchChunks).tensor]);
      const Chunk& chunk = chunks.all[i];
      const ParameterView& view = list.parameters[chunk.tensor];
      if (write_grads)
        update_chunk<Kind, true>(terms, factor, view, chunk.start, chunk.numel);
      else
        update_chunk<Kind, false>(terms, factor, view, chunk.start, chunk.numel);
    }
  });
}

}  // namespace

void update_on_cpu(const UpdateList& list, const UpdateSpec& spec, const Launch& launch) {
  if (is_skipped(spec)) return;
  const float factor = factor_of(spec);
  const bool write_grads = spec.write_grads && factor != 1.0F;
  const Chunks chunks(list.parameters);
  chunks.for_each_task(launch.num_threads, [&](std::size_t begin, std::size_t end) {
    const auto view_of = [&](std::size_t i) -> const ParameterView& {
      return list.parameters[chunks.all[i].tensor];
    };
    for (std::size_t i = begin + 1; begin < end; ++i) {
      const ParameterView& first = view_of(begin);
      if (i < end && view_of(i).group == first.group &&
          step_after(view_of(i).step) == step_after(first.step))
        continue;
      update(list, chunks, begin, i, factor, write_grads);
      begin = i;
    }
  });
  for (const ParameterView& view : list.parameters)
    if (view.step != nullptr) *view.step += 1;
}

}  // namespace fastamp
