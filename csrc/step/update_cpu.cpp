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

// fastamp.AdamW's parameters are updated block by block: read, updated as above, and written.

FASTAMP_SIMD_CLONES void join_halves(const void* __restrict__ high,
                                     const std::int16_t* __restrict__ low, std::int64_t numel,
                                     float* __restrict__ to) {
  const auto* __restrict__ from = static_cast<const std::uint16_t*>(high);
  for (std::int64_t i = 0; i < numel; ++i) to[i] = join({from[i], low[i]});
}

FASTAMP_SIMD_CLONES void split_halves(const float* __restrict__ from, std::int64_t numel,
                                      void* high, std::int16_t* __restrict__ low) {
  auto* __restrict__ to = static_cast<std::uint16_t*>(high);
  for (std::int64_t i = 0; i < numel; ++i) {
    const Halves halves = split(from[i]);
    to[i] = halves.high;
    low[i] = halves.low;
  }
}

/// By the lower 16 bits of the noise, or, with a shift, by others.
FASTAMP_SIMD_CLONES void narrow_randomly(const float* __restrict__ from,
                                         const float* __restrict__ exp_avg, std::uint32_t key,
                                         int shift, std::int64_t numel, void* to) {
  auto* __restrict__ elements = static_cast<std::uint16_t*>(to);
  for (std::int64_t i = 0; i < numel; ++i)
    elements[i] = round_randomly(from[i], noise_of(exp_avg[i], key) >> shift);
}

FASTAMP_SIMD_CLONES void decode(const std::uint8_t* __restrict__ first, float first_scale,
                                const std::uint8_t* __restrict__ second, float second_scale,
                                std::int64_t numel, float* __restrict__ exp_avg,
                                float* __restrict__ exp_avg_sq) {
  for (std::int64_t i = 0; i < numel; ++i) exp_avg[i] = decode_signed(first[i], first_scale);
  for (std::int64_t i = 0; i < numel; ++i) exp_avg_sq[i] = decode_unsigned(second[i], second_scale);
}

/// Returns the largest magnitude's bits, which are in the order of the magnitudes.
FASTAMP_INLINE std::uint32_t largest_of(const float* values, std::int64_t numel) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < numel; ++i) largest = std::max(largest, magnitude_of(values[i]));
  return largest;
}

FASTAMP_SIMD_CLONES void encode(const float* __restrict__ exp_avg,
                                const float* __restrict__ exp_avg_sq, std::uint32_t key,
                                std::int64_t numel, std::uint8_t* __restrict__ first,
                                float* first_scale, std::uint8_t* __restrict__ second,
                                float* second_scale) {
  const auto by_first = scale_of_block<SignedCode>(largest_of(exp_avg, numel));
  const auto by_second = scale_of_block<UnsignedCode>(largest_of(exp_avg_sq, numel));
  *first_scale = by_first.scale;
  *second_scale = by_second.scale;
  for (std::int64_t i = 0; i < numel; ++i) first[i] = encode_signed(exp_avg[i], by_first.inverse);
  for (std::int64_t i = 0; i < numel; ++i)
    second[i] = encode_unsigned(exp_avg_sq[i], by_second.inverse, noise_of(exp_avg[i], key));
}

/// One block of a parameter, with its gradient and moments, as float32.
struct KeptBlock {
  const ParameterView& view;
  const Kept& kept;
  std::int64_t block;
  std::int64_t start;
  std::int64_t numel;
  bool has_codes = kept.scales[0] != nullptr;
  float* values[4] = {};  // of the parameter, the gradient and the moments

  void read(float (*buffers)[kBlockSize]) {
    void* const tensors[] = {view.param, view.grad, view.states[0], view.states[1]};
    const DType dtypes[] = {view.param_dtype, view.grad_dtype, view.state_dtype, view.state_dtype};
    for (int i = 0; i < 4; ++i) {
      const bool is_float = i == 0 ? kept.low == nullptr : i == 1 || !has_codes;
      values[i] =
          is_float ? Floats(tensors[i], dtypes[i], start, numel, buffers[i]).values : buffers[i];
    }
    if (kept.low != nullptr) join_halves(halves(), kept.low + start, numel, values[0]);
    if (has_codes)
      decode(codes(0), kept.scales[0][block], codes(1), kept.scales[1][block], numel, values[2],
             values[3]);
  }

  void write(std::uint32_t key, bool write_grads) const {
    if (kept.low != nullptr)
      split_halves(values[0], numel, halves(), kept.low + start);
    else if (view.param_dtype != DType::kFloat32)
      narrow_randomly(values[0], values[2], key, 0, numel, halves());
    if (write_grads && view.grad_dtype != DType::kFloat32)
      narrow(values[1], numel, view.grad_dtype,
             static_cast<char*>(view.grad) + start * size_of(view.grad_dtype));
    if (has_codes) {
      encode(values[2], values[3], key, numel, codes(0), &kept.scales[0][block], codes(1),
             &kept.scales[1][block]);
    } else if (view.state_dtype != DType::kFloat32) {
      narrow(values[2], numel, view.state_dtype, half_state(0));
      narrow_randomly(values[3], values[2], key, 16, numel, half_state(1));
    }
  }

 private:
  std::uint16_t* halves() const { return static_cast<std::uint16_t*>(view.param) + start; }
  std::uint8_t* codes(int s) const { return static_cast<std::uint8_t*>(view.states[s]) + start; }
  void* half_state(int s) const { return static_cast<std::uint16_t*>(view.states[s]) + start; }
};

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
    const auto terms = Kind::terms(group, step_of(first.step));
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

/// Prefetches the block that is kBlocksAhead further on. A block is read, computed and written in
/// turn, so that nothing is fetched from memory meanwhile unless it is asked for.
FASTAMP_INLINE void prefetch_ahead(const KeptBlock& block) {
  constexpr std::int64_t kBlocksAhead = 4;
  constexpr std::int64_t kLineBytes = 64;
  const auto fetch = [&](const void* tensor, std::int64_t size) FASTAMP_INLINE_LAMBDA {
    if (tensor == nullptr) return;
    const char* from =
        static_cast<const char*>(tensor) + (block.start + kBlocksAhead * kBlockSize) * size;
    for (std::int64_t at = 0; at < block.numel * size; at += kLineBytes)
      __builtin_prefetch(from + at);
  };
  const ParameterView& view = block.view;
  const std::int64_t state_size = block.has_codes ? 1 : size_of(view.state_dtype);
  fetch(view.param, size_of(view.param_dtype));
  fetch(view.grad, size_of(view.grad_dtype));
  fetch(block.kept.low, sizeof(*block.kept.low));
  fetch(view.states[0], state_size);
  fetch(view.states[1], state_size);
}

/// The same for fastamp.AdamW's parameters, whose chunks are of whole blocks.
FASTAMP_SIMD_CLONES void update_kept(const UpdateList& list, const Chunks& chunks,
                                     std::size_t begin, std::size_t end, float factor,
                                     bool write_grads) {
  using Kind = Adam<false>;
  const ParameterView& first = list.parameters[chunks.all[begin].tensor];
  const float step = step_of(first.step);
  const auto terms = Kind::terms(list.groups[first.group], step);
  alignas(64) float buffers[4][kBlockSize];
  for (std::size_t i = begin; i < end; ++i) {
    const Chunk& chunk = chunks.all[i];
    const Kept& kept = list.kept[chunk.tensor];
    const std::uint32_t key = key_of(kept.seed, step);
    const Blocks blocks(kept.row);
    for (std::int64_t at = chunk.start; at < chunk.start + chunk.numel; at += kBlockSize) {
      const std::int64_t place = at / kBlockSize;
      KeptBlock block{list.parameters[chunk.tensor], kept, place, blocks.start(place),
                      blocks.numel(place)};
      if (block.has_codes) prefetch_ahead(block);  // the others wait for memory all the time
      block.read(buffers);
      float* const* values = block.values;
      if (write_grads)
        update_floats<Kind, true>(terms, factor, block.numel, values[0], values[1], values[2],
                                  values[3], nullptr);
      else
        update_floats<Kind, false>(terms, factor, block.numel, values[0], values[1], values[2],
                                   values[3], nullptr);
      block.write(key, write_grads);
    }
  }
}

/// The chunks of all parameters; fastamp.AdamW's have as many elements as their blocks have room.
Chunks cut(const UpdateList& list) {
  if (list.kept.empty()) return Chunks(list.parameters);
  std::vector<TensorView> rooms;
  for (std::size_t i = 0; i < list.parameters.size(); ++i) {
    const Blocks blocks(list.kept[i].row);
    rooms.push_back(
        {nullptr, blocks.count(list.parameters[i].numel) * kBlockSize, DType::kFloat32});
  }
  return Chunks(rooms);
}

}  // namespace

void update_on_cpu(const UpdateList& list, const UpdateSpec& spec, const Launch& launch) {
  if (is_skipped(spec)) return;
  if (spec.counts) list.count_step();
  const float factor = factor_of(spec);
  const bool write_grads = spec.write_grads && factor != 1.0F;
  const Chunks chunks = cut(list);
  const auto run = list.kept.empty() ? update : update_kept;
  chunks.for_each_task(launch.num_threads, [&](std::size_t begin, std::size_t end) {
    const auto view_of = [&](std::size_t i) -> const ParameterView& {
      return list.parameters[chunks.all[i].tensor];
    };
    for (std::size_t i = begin + 1; begin < end; ++i) {
      const ParameterView& first = view_of(begin);
      if (i < end && view_of(i).group == first.group &&
          step_of(view_of(i).step) == step_of(first.step))
        continue;
      run(list, chunks, begin, i, factor, write_grads);
      begin = i;
    }
  });
}

}  // namespace fastamp
