// The GPU's update of a lean optimizer: a warp for each block of 256 elements, so that the largest
// values of a block meet in the warp's registers.
#include <cstdint>

#include "step/formats.h"
#include "step/launcher.cuh"
#include "step/vectors.cuh"

namespace fastamp {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffffU;
constexpr int kVectors = static_cast<int>(kBlockSize) / (kWarp * kVector);  // of a thread

/// One parameter. Codes stand in the states' places.
template <int kCount>
struct LeanEntry : Entry<kCount> {
  float* scales[kCount > 0 ? kCount : 1];  // null: the states are floats
  std::int16_t* low;
  std::uint32_t row;
  std::uint32_t seed;
  bool is_random;  // whether the parameter is rounded randomly
};
static_assert(300 * sizeof(LeanEntry<2>) + 40 * sizeof(GroupOptions) <= kLongTable);

/// A thread's elements of the tensors of a block, four neighboring ones in each vector.
template <int kTensors>
using Elements = float[kTensors][kVectors][kVector];

/// One block of a parameter, for the threads of a warp. Tensor 0 is the parameter, the states
/// follow, and the gradient is the last.
template <typename Kind>
struct WarpBlock {
  static constexpr int kGrad = 1 + Kind::kStates;
  using Values = Elements<2 + Kind::kStates>;

  const LeanEntry<Kind::kStates>& entry;
  Block block;
  int lane;

  __device__ bool has_codes() const { return Kind::kStates > 0 && entry.scales[0] != nullptr; }
  __device__ bool has_codes(int i) const { return i > 0 && i < kGrad && has_codes(); }
  __device__ std::uint8_t* codes(int s) const {
    return static_cast<std::uint8_t*>(entry.tensors[1 + s]) + block.start;
  }
  __device__ TensorChunk tensor(int i) const {
    const std::uint32_t format = i == 0       ? entry.param_format
                                 : i == kGrad ? entry.grad_format
                                              : entry.state_format;
    return TensorChunk(entry.tensors[i], format, block.start);
  }
  __device__ int index(int vector) const { return (vector * kWarp + lane) * kVector; }
  /// The elements from a vector's first one on; none if it is below 1. It is not cut to kVector:
  /// nvcc 13.0 made one instruction of both limits (VIMNMX.RELU of sm_90) with one predicate for
  /// two conditions, and read four elements where one was left.
  __device__ int count(int vector) const { return block.numel - index(vector); }

  /// Reads all tensors before it uses the first.
  __device__ void read(Values& values) const {
    Raw raws[kGrad + 1][kVectors];
    Four<std::int16_t> lows[kVectors] = {};
    float scales[kGrad] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i <= kGrad; ++i)
        if (has_codes(i))
          raws[i][v].codes = load_four<std::uint8_t>(codes(i - 1) + index(v), count(v));
        else
          tensor(i).load(index(v), count(v), raws[i][v]);
      if (entry.low != nullptr) lows[v] = load_four(entry.low + block.start + index(v), count(v));
    }
    for (int s = 0; s < Kind::kStates && has_codes(); ++s)
      scales[s] = entry.scales[s][block.number];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i <= kGrad; ++i)
        if (has_codes(i))
          decode_vector(i - 1, raws[i][v].codes, scales[i - 1], values[i][v]);
        else
          tensor(i).widen(raws[i][v], values[i][v]);
      if (entry.low == nullptr) continue;
#pragma unroll
      for (int k = 0; k < kVector; ++k)
        values[0][v][k] =
            join({static_cast<std::uint16_t>(bits_of(values[0][v][k]) >> 16), lows[v].values[k]});
    }
  }

  __device__ void write(const Values& values, std::uint32_t key, bool write_grads) const {
    if (write_grads)
#pragma unroll
      for (int v = 0; v < kVectors; ++v) tensor(kGrad).store(values[kGrad][v], index(v), count(v));
    if (entry.low == nullptr)
      store(0, values, key, entry.is_random, 0);
    else
      write_halves(values[0]);
#pragma unroll
    for (int s = 0; s < Kind::kStates; ++s)
      if (has_codes())
        write_codes(s, values, key);
      else
        store(1 + s, values, key, Kind::is_random(s), 16);
  }

 private:
  __device__ static void decode_vector(int s, const Four<std::uint8_t>& from, float scale,
                                       float* to) {
    visit_code(Kind::code_of(s), [&](auto code) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) to[k] = decode<decltype(code)>(from.values[k], scale);
    });
  }

  __device__ std::uint32_t noise(const Values& values, int v, int k, std::uint32_t key) const {
    const float state = Kind::kStates > 0 ? values[1][v][k] : 0;
    const std::uint32_t place = block.place + static_cast<std::uint32_t>(index(v) + k);
    return noise_of(state, values[0][v][k], has_codes() ? place : place % entry.row, key);
  }

  __device__ void write_halves(const float (&from)[kVectors][kVector]) const {
    auto* const to = static_cast<std::uint16_t*>(entry.tensors[0]) + block.start;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Four<std::uint16_t> highs;
      Four<std::int16_t> lows;
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const Halves halves = split(from[v][k]);
        highs.values[k] = halves.high;
        lows.values[k] = halves.low;
      }
      store_four(highs, to + index(v), count(v));
      store_four(lows, entry.low + block.start + index(v), count(v));
    }
  }

  /// Writes floats to the nearest, or rounds them to bfloat16 by 16 bits of noise from `shift` on.
  __device__ void store(int i, const Values& values, std::uint32_t key, bool is_random,
                        int shift) const {
    const TensorChunk chunk = tensor(i);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!is_random || chunk.format != Format::kBFloat16) {
        chunk.store(values[i][v], index(v), count(v));
        continue;
      }
      Four<std::uint16_t> rounded;
#pragma unroll
      for (int k = 0; k < kVector; ++k)
        rounded.values[k] = round_randomly(values[i][v][k], noise(values, v, k, key) >> shift);
      store_four(rounded, static_cast<std::uint16_t*>(chunk.data) + index(v), count(v));
    }
  }

  __device__ void write_codes(int s, const Values& values, std::uint32_t key) const {
    visit_code(Kind::code_of(s), [&](auto code) {
      using Code = decltype(code);
      const auto scale = scale_of_block<Code>(largest_of(values[1 + s]));
      if (lane == 0) entry.scales[s][block.number] = scale.scale;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        Four<std::uint8_t> made;
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const std::uint32_t rounding =
              Kind::is_random(s) ? rounding_of(noise(values, v, k, key)) : kNearest;
          made.values[k] = encode<Code>(values[1 + s][v][k], scale.inverse, rounding);
        }
        store_four<std::uint8_t>(made, codes(s) + index(v), count(v));
      }
    });
  }

  /// Returns the bits of the block's largest magnitude to all threads. Elements past the end are 0.
  __device__ std::uint32_t largest_of(const float (&values)[kVectors][kVector]) const {
    std::uint32_t largest = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const std::uint32_t own = k < count(v) ? magnitude_of(values[v][k]) : 0;
        largest = own > largest ? own : largest;
      }
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const std::uint32_t other = __shfl_sync(kWholeWarp, largest, lane ^ offset);
      largest = other > largest ? other : largest;
    }
    return largest;
  }
};

// A thread has two vectors of each tensor in flight, 64 bytes where all are short, so that 512
// threads ask for the 27 KB of vectors.cuh. With more of them its values would not fit into
// registers.
constexpr int kLeanBlocksPerProcessor = 2;

/// One block of threads updates one chunk, a warp one block of elements after the other.
template <typename Kind, std::size_t kBytes>
__global__ void __launch_bounds__(kThreads, kLeanBlocksPerProcessor)
    lean_kernel(const UpdateTable<LeanEntry<Kind::kStates>, kBytes> __grid_constant__ table,
                UpdateSpec spec) {
  constexpr int kGrad = WarpBlock<Kind>::kGrad;
  __shared__ typename Kind::Terms terms;
  if (is_skipped(spec)) return;
  const Place place = table.place(blockIdx.x);
  const auto& entry = table.entries()[place.entry];
  if (threadIdx.x == 0) terms = terms_of<Kind>(table, entry);
  __syncthreads();
  const typename Kind::Terms own = terms;  // in registers
  const std::uint32_t key = key_of(entry.seed, step_of(entry.step));
  const float factor = factor_of(spec);
  const bool has_codes = Kind::kStates > 0 && entry.scales[0] != nullptr;
  const Blocks blocks(place.start, place.numel, entry.row, has_codes, kBlockSize);
  for (std::uint32_t i = threadIdx.x / kWarp; i < blocks.count(); i += kThreads / kWarp) {
    const WarpBlock<Kind> block{entry, blocks[i], static_cast<int>(threadIdx.x) % kWarp};
    typename WarpBlock<Kind>::Values values;
    block.read(values);
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        float states[kMaxStates] = {};
#pragma unroll
        for (int s = 0; s < Kind::kStates; ++s) states[s] = values[1 + s][v][k];
        values[kGrad][v][k] = product(values[kGrad][v][k], factor);
        Kind::apply(own, values[kGrad][v][k], values[0][v][k], states);
#pragma unroll
        for (int s = 0; s < Kind::kStates; ++s) values[1 + s][v][k] = states[s];
      }
    block.write(values, key, spec.write_grads && factor != 1.0F);
  }
}

/// Calls fn(kind) for every kind that a lean optimizer follows.
template <typename Fn>
void for_each_lean_kind(Fn fn) {
  for_each_kind([&](auto kind) {
    if constexpr (decltype(kind)::kIsLean) fn(kind);
  });
}

}  // namespace

void check_lean_kernels() {
  for_each_lean_kind([](auto kind) {
    check_kernel("lean_kernel", lean_kernel<decltype(kind), kLongTable>);
    check_kernel("lean_kernel", lean_kernel<decltype(kind), kShortTable>);
  });
}

void launch_lean(const UpdateList& list, const UpdateSpec& spec, cudaStream_t stream) {
  for_each_lean_kind([&](auto kind) {
    using Kind = decltype(kind);
    using Item = LeanEntry<Kind::kStates>;
    if (Kind::kRule != list.rule) return;
    Launcher<Item> launcher("lean_kernel", lean_kernel<Kind, kLongTable>,
                            lean_kernel<Kind, kShortTable>, list, spec, stream);
    for (const ParameterView& view : list.parameters) {
      if (view.is_plain() || !Kind::serves(list.groups[view.group])) continue;
      Item item{};
      for (int s = 0; s < Kind::kStates; ++s) item.scales[s] = view.states[s].scales;
      item.low = view.low;
      item.row = view.row;
      item.seed = view.seed;
      item.is_random = view.param.is_random;
      launcher.add(item, view);
    }
    launcher.flush();
  });
}

}  // namespace fastamp
