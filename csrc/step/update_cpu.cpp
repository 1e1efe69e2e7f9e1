// The CPU's update: one pass over parameters, gradients and states, all groups and dtypes together.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "step/chunks.h"
#include "step/convert.h"
#include "step/formats.h"
#include "step/math.h"
#include "step/ops.h"
#include "step/rules.h"

namespace fastamp {
namespace {

// Tensors that are not float32 are updated in blocks that stay in the first-level cache.
constexpr std::int64_t kBlock = 512;
constexpr int kMaxTensors = 2 + kMaxStates;  // of one parameter, its gradient and itself included
constexpr std::size_t kPrefetchChunks = 2;   // fewer than for a norm: updates take longer

/// Reads a block of a tensor as float32. `low` has the lower halves of weights, or is null.
FASTAMP_SIMD_CLONES void read_block(const Stored& stored, const std::int16_t* __restrict__ low,
                                    const Block& block, float* __restrict__ to) {
  const int numel = block.numel;
  const auto fill = [&](auto tag, auto value_of) FASTAMP_INLINE_LAMBDA {
    const auto* from = static_cast<const decltype(tag)*>(stored.data) + block.start;
    for (int i = 0; i < numel; ++i) to[i] = value_of(from[i], i);
  };
  if (low != nullptr) {
    low += block.start;
    fill(std::uint16_t{},
         [&](std::uint16_t high, int i) FASTAMP_INLINE_LAMBDA { return join({high, low[i]}); });
  } else if (is_coded(stored.format)) {
    const float scale = stored.scales[block.number];
    visit_code(stored.format, [&](auto code) FASTAMP_INLINE_LAMBDA {
      fill(std::uint8_t{}, [&](std::uint8_t x, int)
                               FASTAMP_INLINE_LAMBDA { return decode<decltype(code)>(x, scale); });
    });
  } else {
    visit_host_format(stored.format, [&](auto tag) FASTAMP_INLINE_LAMBDA {
      fill(tag, [](auto x, int) FASTAMP_INLINE_LAMBDA { return to_float(x); });
    });
  }
}

/// Writes a block. What is rounded randomly is so by the bits of its noise from `shift` on; codes
/// take the upper ones.
FASTAMP_SIMD_CLONES void write_block(const float* __restrict__ from, const Stored& stored,
                                     std::int16_t* __restrict__ low, const Block& block,
                                     const std::uint32_t* __restrict__ noise, int shift) {
  const int numel = block.numel;
  const auto fill = [&](auto tag, auto value_of) FASTAMP_INLINE_LAMBDA {
    auto* __restrict__ to = static_cast<decltype(tag)*>(stored.data) + block.start;
    for (int i = 0; i < numel; ++i) to[i] = value_of(from[i], i);
  };
  if (low != nullptr) {
    low += block.start;
    fill(std::uint16_t{}, [&](float x, int i) FASTAMP_INLINE_LAMBDA {
      const Halves halves = split(x);
      low[i] = halves.low;
      return halves.high;
    });
  } else if (is_coded(stored.format)) {
    visit_code(stored.format, [&](auto code) FASTAMP_INLINE_LAMBDA {
      using Code = decltype(code);
      std::uint32_t largest = 0;  // bits of magnitudes are in the order of these
      for (int i = 0; i < numel; ++i) largest = std::max(largest, magnitude_of(from[i]));
      const BlockScale scale = scale_of_block<Code>(largest);
      stored.scales[block.number] = scale.scale;
      if (stored.is_random)
        fill(std::uint8_t{}, [&](float x, int i) FASTAMP_INLINE_LAMBDA {
          return encode<Code>(x, scale.inverse, rounding_of(noise[i]));
        });
      else
        fill(std::uint8_t{}, [&](float x, int) FASTAMP_INLINE_LAMBDA {
          return encode<Code>(x, scale.inverse, kNearest);
        });
    });
  } else if (stored.is_random) {
    fill(std::uint16_t{}, [&](float x, int i) FASTAMP_INLINE_LAMBDA {
      return round_randomly(x, noise[i] >> shift);
    });
  } else {
    visit_host_format(stored.format, [&](auto tag) FASTAMP_INLINE_LAMBDA {
      fill(tag, [](float x, int) FASTAMP_INLINE_LAMBDA {
        decltype(tag) rounded;
        from_float(x, &rounded);
        return rounded;
      });
    });
  }
}

/// Fills in the random bits of a block's elements; `state` is null where there is none.
FASTAMP_SIMD_CLONES void fill_noise(const float* __restrict__ state,
                                    const float* __restrict__ param, const Block& block,
                                    std::uint32_t row, std::uint32_t key,
                                    std::uint32_t* __restrict__ noise) {
  std::uint32_t place = block.place % row;
  for (int i = 0; i < block.numel; place = 0) {  // row by row
    const int end = i + static_cast<int>(std::min<std::uint32_t>(
                            static_cast<std::uint32_t>(block.numel - i), row - place));
    const std::uint32_t from = place - static_cast<std::uint32_t>(i);
    for (; i < end; ++i)
      noise[i] = noise_of(state == nullptr ? 0 : state[i], param[i],
                          from + static_cast<std::uint32_t>(i), key);
  }
}

/// The loop over elements.
template <typename Kind, bool kWriteGrads>
FASTAMP_INLINE void update_floats(const typename Kind::Terms& terms, float factor,
                                  std::int64_t numel, float* __restrict__ param,
                                  float* __restrict__ grad, float* __restrict__ state0,
                                  float* __restrict__ state1) {
  for (std::int64_t i = 0; i < numel; ++i) {
    const float g = product(grad[i], factor);
    if (kWriteGrads) grad[i] = g;
    float states[kMaxStates] = {Kind::kStates > 0 ? state0[i] : 0,
                                Kind::kStates > 1 ? state1[i] : 0};
    float p = param[i];
    Kind::apply(terms, g, p, states);
    param[i] = p;
    if (Kind::kStates > 0) state0[i] = states[0];
    if (Kind::kStates > 1) state1[i] = states[1];
  }
}

/// Prefetches the block that is kBlocksAhead further on. A block is read, computed and written in
/// turn, so that nothing is fetched from memory meanwhile unless it is asked for.
FASTAMP_INLINE void prefetch_ahead(const ParameterView& view, const Block& block) {
  constexpr std::int64_t kBlocksAhead = 4;
  constexpr std::int64_t kLineBytes = 64;
  const auto fetch = [&](const void* tensor, std::int64_t size) FASTAMP_INLINE_LAMBDA {
    if (tensor == nullptr) return;
    const char* from =
        static_cast<const char*>(tensor) + (block.start + kBlocksAhead * kBlockSize) * size;
    for (std::int64_t at = 0; at < block.numel * size; at += kLineBytes)
      __builtin_prefetch(from + at);
  };
  fetch(view.param.data, size_of(view.param.format));
  fetch(view.grad.data, size_of(view.grad.format));
  fetch(view.low, sizeof(*view.low));
  for (const Stored& state : view.states) fetch(state.data, size_of(state.format));
}

/// Whether a rule's tensors are updated in place: all are float32.
template <typename Kind>
FASTAMP_INLINE bool is_wide(const ParameterView& view) {
  bool found = view.param.format == Format::kFloat32 && view.grad.format == Format::kFloat32;
  for (int s = 0; s < Kind::kStates; ++s) found &= view.states[s].format == Format::kFloat32;
  return found;
}

template <typename Kind, bool kWriteGrads>
FASTAMP_INLINE void update_chunk(const typename Kind::Terms& terms, float factor, std::uint32_t key,
                                 const ParameterView& view, const Chunk& chunk) {
  alignas(64) float buffers[kMaxTensors][kBlock];
  alignas(64) std::uint32_t noise[kBlock];
  const Stored* const tensors[kMaxTensors] = {&view.param, &view.grad, &view.states[0],
                                              &view.states[1]};
  const bool has_noise = view.has_noise();
  const Blocks blocks(chunk.start, chunk.numel, view.row, view.has_codes(),
                      is_wide<Kind>(view) ? chunk.numel : kBlock);
  for (std::uint32_t i = 0; i < blocks.count(); ++i) {
    const Block block = blocks[i];
    if (view.has_codes()) prefetch_ahead(view, block);  // the others wait for memory all the time
    float* values[kMaxTensors] = {};
    for (int t = 0; t < 2 + Kind::kStates; ++t) {
      if (tensors[t]->format == Format::kFloat32)  // its own memory, of another there is a copy
        values[t] = static_cast<float*>(tensors[t]->data) + block.start;
      else
        read_block(*tensors[t], t == 0 ? view.low : nullptr, block, values[t] = buffers[t]);
    }
    update_floats<Kind, kWriteGrads>(terms, factor, block.numel, values[0], values[1], values[2],
                                     values[3]);
    if (has_noise) fill_noise(values[2], values[0], block, view.row, key, noise);
    for (int t = 0; t < 2 + Kind::kStates; ++t)
      if (tensors[t]->format != Format::kFloat32 && (kWriteGrads || t != 1))
        write_block(values[t], *tensors[t], t == 0 ? view.low : nullptr, block, noise,
                    t == 0 ? 0 : 16);
  }
}

void prefetch(const ParameterView& view) {
  __builtin_prefetch(view.param.data);
  __builtin_prefetch(view.grad.data);
  for (const Stored& state : view.states) __builtin_prefetch(state.data);
}

/// Updates chunks whose parameters have the same options and step, and so the same terms, which
/// take as long as a hundred elements.
FASTAMP_SIMD_CLONES void update(const UpdateList& list, const Chunks& chunks, std::size_t begin,
                                std::size_t end, float factor, bool write_grads) {
  const ParameterView& first = list.parameters[chunks.all[begin].tensor];
  const GroupOptions& group = list.groups[first.group];
  visit_rule(list.rule, group, [&](auto kind) FASTAMP_INLINE_LAMBDA {
    using Kind = decltype(kind);
    const float step = step_of(first.step);
    const auto terms = Kind::terms(group, step);
    for (std::size_t i = begin; i < end; ++i) {
      prefetch(list.parameters[chunks.at_most(i + kPrefetchChunks).tensor]);
      const Chunk& chunk = chunks.all[i];
      const ParameterView& view = list.parameters[chunk.tensor];
      const std::uint32_t key = key_of(view.seed, step);
      if (write_grads)
        update_chunk<Kind, true>(terms, factor, key, view, chunk);
      else
        update_chunk<Kind, false>(terms, factor, key, view, chunk);
    }
  });
}

}  // namespace

void update_on_cpu(const UpdateList& list, const UpdateSpec& spec, const Launch& launch) {
  if (is_skipped(spec)) return;
  if (spec.counts) list.count_step();
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
          step_of(view_of(i).step) == step_of(first.step))
        continue;
      update(list, chunks, begin, i, factor, write_grads);
      begin = i;
    }
  });
}

}  // namespace fastamp
