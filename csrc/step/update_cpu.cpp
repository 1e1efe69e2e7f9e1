// The CPU's update: one pass over parameters, gradients and states, all groups and dtypes together.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "parallel/threads.h"
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

/// At most kChunk elements of one parameter.
struct Chunk {
  std::uint32_t parameter;
  std::int64_t start;
  std::int64_t numel;
};

/// The chunks of all parameters, in tasks that are worth a thread's while.
struct Tasks {
  std::vector<Chunk> chunks;
  std::vector<std::size_t> starts;  // and one past the last

  explicit Tasks(const std::vector<ParameterView>& parameters) {
    std::int64_t in_task = kChunk;
    chunks.reserve(parameters.size());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      for (std::int64_t start = 0; start < parameters[i].numel; start += kChunk) {
        if (in_task >= kChunk) {
          starts.push_back(chunks.size());
          in_task = 0;
        }
        const std::int64_t numel = std::min(kChunk, parameters[i].numel - start);
        chunks.push_back({static_cast<std::uint32_t>(i), start, numel});
        in_task += numel;
      }
    }
    starts.push_back(chunks.size());
  }
};

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
  void* place;
  DType dtype;
  float* values;

  Floats(void* data, DType type, std::int64_t start, std::int64_t numel, float* buffer)
      : place(static_cast<char*>(data) + start * size_of(type)), dtype(type), values(buffer) {
    if (dtype == DType::kFloat32)
      values = static_cast<float*>(place);
    else
      widen(place, dtype, numel, values);
  }

  void write(std::int64_t numel) const {
    if (dtype != DType::kFloat32) narrow(values, numel, dtype, place);
  }
};

/// The loop over elements.
template <typename Rule, bool kWriteGrads>
FASTAMP_INLINE void update_floats(const typename Rule::Terms& terms, float factor,
                                  std::int64_t numel, float* __restrict__ param,
                                  float* __restrict__ grad, float* __restrict__ state0,
                                  float* __restrict__ state1, float* __restrict__ state2) {
  for (std::int64_t i = 0; i < numel; ++i) {
    const float g = product(grad[i], factor);
    if (kWriteGrads) grad[i] = g;
    float states[kMaxStates] = {Rule::kStates > 0 ? state0[i] : 0,
                                Rule::kStates > 1 ? state1[i] : 0,
                                Rule::kStates > 2 ? state2[i] : 0};
    float p = param[i];
    Rule::apply(terms, g, p, states);
    param[i] = p;
    if (Rule::kStates > 0) state0[i] = states[0];
    if (Rule::kStates > 1) state1[i] = states[1];
    if (Rule::kStates > 2) state2[i] = states[2];
  }
}

template <typename Rule, bool kWriteGrads>
FASTAMP_INLINE void update_chunk(const typename Rule::Terms& terms, float factor,
                                 const ParameterView& view, std::int64_t start,
                                 std::int64_t numel) {
  const bool is_wide = view.param_dtype == DType::kFloat32 && view.grad_dtype == DType::kFloat32 &&
                       (Rule::kStates == 0 || view.state_dtype == DType::kFloat32);
  const std::int64_t step = is_wide ? numel : kBlock;
  alignas(64) float buffers[kMaxTensors][kBlock];
  for (const std::int64_t end = start + numel; start < end; start += step) {
    const std::int64_t count = std::min(step, end - start);
    const Floats param(view.param, view.param_dtype, start, count, buffers[0]);
    const Floats grad(view.grad, view.grad_dtype, start, count, buffers[1]);
    const auto state = [&](int s) FASTAMP_INLINE_LAMBDA {
      void* const data = s < Rule::kStates ? view.states[s] : nullptr;
      const DType dtype = data == nullptr ? DType::kFloat32 : view.state_dtype;
      return Floats(data, dtype, data == nullptr ? 0 : start, count, buffers[2 + s]);
    };
    const Floats states[kMaxStates] = {state(0), state(1), state(2)};
    update_floats<Rule, kWriteGrads>(terms, factor, count, param.values, grad.values,
                                     states[0].values, states[1].values, states[2].values);
    if (is_wide) continue;
    param.write(count);
    if (kWriteGrads) grad.write(count);
    for (int s = 0; s < Rule::kStates; ++s) states[s].write(count);
  }
}

float step_of(const ParameterView& view) { return view.step == nullptr ? 0.0F : *view.step + 1; }

/// Consecutive chunks whose parameters have the same options and step, and so the same terms, which
/// take as long as a hundred elements.
struct Run {
  const Chunk* begin;
  const Chunk* end;

  Run(const std::vector<ParameterView>& parameters, const Chunk* first, const Chunk* last)
      : begin(first), end(first + 1) {
    const ParameterView& view = parameters[first->parameter];
    const float step = step_of(view);
    for (; end < last; ++end) {
      const ParameterView& other = parameters[end->parameter];
      if (other.group != view.group || step_of(other) != step) break;
    }
  }
};

void prefetch(const ParameterView& view) {
  __builtin_prefetch(view.param);
  __builtin_prefetch(view.grad);
  for (const void* state : view.states) __builtin_prefetch(state);
}

FASTAMP_SIMD_CLONES void update(const UpdateList& list, const Tasks& tasks, const Run& run,
                                float factor, bool write_grads) {
  const ParameterView& first = list.parameters[run.begin->parameter];
  const GroupOptions& group = list.groups[first.group];
  visit_rule(list.rule, group, [&](auto tag) FASTAMP_INLINE_LAMBDA {
    using Chosen = decltype(tag);
    const auto terms = Chosen::terms(group, step_of(first));
    for (const Chunk* chunk = run.begin; chunk < run.end; ++chunk) {
      const Chunk* ahead = std::min(chunk + kPrefetchChunks, &tasks.chunks.back());
      prefetch(list.parameters[ahead->parameter]);
      const ParameterView& view = list.parameters[chunk->parameter];
      if (write_grads)
        update_chunk<Chosen, true>(terms, factor, view, chunk->start, chunk->numel);
      else
        update_chunk<Chosen, false>(terms, factor, view, chunk->start, chunk->numel);
    }
  });
}

}  // namespace

void update_on_cpu(const UpdateList& list, const UpdateSpec& spec, const Launch& launch) {
  if (spec.found_inf != nullptr && *spec.found_inf != 0) return;
  const float factor = spec.factor == nullptr ? 1.0F : *spec.factor;
  const bool write_grads = spec.write_grads && factor != 1.0F;
  const Tasks tasks(list.parameters);
  const auto count = static_cast<std::int64_t>(tasks.starts.size()) - 1;
  parallel_for(count, launch.num_threads, [&](std::int64_t task) {
    const auto t = static_cast<std::size_t>(task);
    const Chunk* const end = &tasks.chunks[0] + tasks.starts[t + 1];
    for (const Chunk* chunk = &tasks.chunks[tasks.starts[t]]; chunk < end;) {
      const Run run(list.parameters, chunk, end);
      update(list, tasks, run, factor, write_grads);
      chunk = run.end;
    }
  });
  for (const ParameterView& view : list.parameters)
    if (view.step != nullptr) *view.step += 1;
}

}  // namespace fastamp
