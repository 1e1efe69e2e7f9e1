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

/// Converts elements of 16 bits to float32.
FASTAMP_SIMD_CLONES void widen(const void* from, Format dtype, std::int64_t numel, float* to) {
  visit_host_format(dtype, [&](auto tag) FASTAMP_INLINE_LAMBDA {
    const auto* elements = static_cast<const decltype(tag)*>(from);
    for (std::int64_t i = 0; i < numel; ++i) to[i] = to_float(elements[i]);
  });
}

FASTAMP_SIMD_CLONES void narrow(const float* from, std::int64_t numel, Format dtype, void* to) {
  visit_host_format(dtype, [&](auto tag) FASTAMP_INLINE_LAMBDA {
    auto* elements = static_cast<decltype(tag)*>(to);
    for (std::int64_t i = 0; i < numel; ++i) from_float(from[i], &elements[i]);
  });
}

FASTAMP_SIMD_CLONES void join_halves(const std::uint16_t* __restrict__ high,
                                     const std::int16_t* __restrict__ low, std::int64_t numel,
                                     float* __restrict__ to) {
  for (std::int64_t i = 0; i < numel; ++i) to[i] = join({high[i], low[i]});
}

FASTAMP_SIMD_CLONES void split_halves(const float* __restrict__ from, std::int64_t numel,
                                      std::uint16_t* __restrict__ high,
                                      std::int16_t* __restrict__ low) {
  for (std::int64_t i = 0; i < numel; ++i) {
    const Halves halves = split(from[i]);
    high[i] = halves.high;
    low[i] = halves.low;
  }
}

/// Rounds to bfloat16 by the lower 16 bits of the noise or, with a shift, by others.
FASTAMP_SIMD_CLONES void narrow_randomly(const float* __restrict__ from,
                                         const std::uint32_t* __restrict__ noise, int shift,
                                         std::int64_t numel, std::uint16_t* __restrict__ to) {
  for (std::int64_t i = 0; i < numel; ++i) to[i] = round_randomly(from[i], noise[i] >> shift);
}

FASTAMP_SIMD_CLONES void decode_block(const std::uint8_t* __restrict__ from, float scale,
                                      Format format, std::int64_t numel, float* __restrict__ to) {
  visit_code(format, [&](auto code) FASTAMP_INLINE_LAMBDA {
    for (std::int64_t i = 0; i < numel; ++i) to[i] = decode<decltype(code)>(from[i], scale);
  });
}

/// Returns the largest magnitude's bits, which are in the order of the magnitudes.
FASTAMP_INLINE std::uint32_t largest_of(const float* values, std::int64_t numel) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < numel; ++i) largest = std::max(largest, magnitude_of(values[i]));
  return largest;
}

/// Returns the scale of the codes. Without noise they are rounded to the nearest.
FASTAMP_SIMD_CLONES float encode_block(const float* __restrict__ from,
                                       const std::uint32_t* __restrict__ noise, Format format,
                                       std::int64_t numel, std::uint8_t* __restrict__ to) {
  return visit_code(format, [&](auto code) FASTAMP_INLINE_LAMBDA {
    using Code = decltype(code);
    const BlockScale scale = scale_of_block<Code>(largest_of(from, numel));
    if (noise == nullptr)
      for (std::int64_t i = 0; i < numel; ++i)
        to[i] = encode<Code>(from[i], scale.inverse, kNearest);
    else
      for (std::int64_t i = 0; i < numel; ++i)
        to[i] = encode<Code>(from[i], scale.inverse, rounding_of(noise[i]));
    return scale.scale;
  });
}

/// Fills in the random bits of a block's elements; `state` is null where there is none.
FASTAMP_SIMD_CLONES void fill_noise(const float* __restrict__ state,
                                    const float* __restrict__ param, const Block& block,
                                    std::uint32_t row, std::uint32_t key,
                                    std::uint32_t* __restrict__ noise) {
  std::uint32_t place = block.place;
  for (int i = 0; i < block.numel; place = 0) {  // row by row
    const int end = i + static_cast<int>(std::min<std::uint32_t>(
                            static_cast<std::uint32_t>(block.numel - i), row - place));
    const std::uint32_t from = place - static_cast<std::uint32_t>(i);
    for (; i < end; ++i)
      noise[i] = noise_of(state == nullptr ? 0 : state[i], param[i],
                          from + static_cast<std::uint32_t>(i), key);
  }
}

/// A block of one tensor as float32: its own memory, or a buffer with copies.
struct Values {
  const Stored& stored;
  const Block& block;
  float* floats = nullptr;

  template <typename T>
  T* data() const {
    return static_cast<T*>(stored.data) + block.start;
  }

  void read(float* buffer, std::int16_t* low = nullptr) {
    floats = stored.format == Format::kFloat32 ? data<float>() : buffer;
    if (low != nullptr)
      join_halves(data<std::uint16_t>(), low + block.start, block.numel, floats);
    else if (is_coded(stored.format))
      decode_block(data<std::uint8_t>(), stored.scales[block.number], stored.format, block.numel,
                   floats);
    else if (stored.format != Format::kFloat32)
      widen(data<std::uint16_t>(), stored.format, block.numel, floats);
  }

  void write(const std::uint32_t* noise, int shift, std::int16_t* low = nullptr) const {
    if (low != nullptr)
      split_halves(floats, block.numel, data<std::uint16_t>(), low + block.start);
    else if (is_coded(stored.format))
      stored.scales[block.number] = encode_block(floats, stored.is_random ? noise : nullptr,
                                                 stored.format, block.numel, data<std::uint8_t>());
    else if (stored.format != Format::kFloat32 && stored.is_random)
      narrow_randomly(floats, noise, shift, block.numel, data<std::uint16_t>());
    else if (stored.format != Format::kFloat32)
      narrow(floats, block.numel, stored.format, data<std::uint16_t>());
  }
};

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
  const bool has_noise = view.has_noise();
  const Blocks blocks(chunk.start, chunk.numel, view.row, view.has_codes(),
                      is_wide<Kind>(view) ? chunk.numel : kBlock);
  for (std::uint32_t i = 0; i < blocks.count(); ++i) {
    const Block block = blocks[i];
    if (view.has_codes()) prefetch_ahead(view, block);  // the others wait for memory all the time
    Values param{view.param, block};
    Values grad{view.grad, block};
    Values states[kMaxStates] = {{view.states[0], block}, {view.states[1], block}};
    param.read(buffers[0], view.low);
    grad.read(buffers[1]);
    for (int s = 0; s < Kind::kStates; ++s) states[s].read(buffers[2 + s]);
    update_floats<Kind, kWriteGrads>(terms, factor, block.numel, param.floats, grad.floats,
                                     states[0].floats, states[1].floats);
    if (has_noise) fill_noise(states[0].floats, param.floats, block, view.row, key, noise);
    param.write(noise, 0, view.low);
    if (kWriteGrads) grad.write(noise, 0);
    for (int s = 0; s < Kind::kStates; ++s) states[s].write(noise, 16);
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
