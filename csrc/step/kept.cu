// The GPU's update of fastamp.AdamW: a warp for each block of 256 elements, so that the largest
// moments of a block meet in the warp's registers.
#include <cstdint>

#include "step/formats.h"
#include "step/launcher.cuh"
#include "step/vectors.cuh"

namespace fastamp {
namespace {

using Kind = Adam<false>;
constexpr int kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffffU;
constexpr int kVectors = static_cast<int>(kBlockSize) / (kWarp * kVector);  // of a thread

/// One parameter. Codes stand in the moments' places.
struct KeptEntry : Entry<2> {
  Kept kept;
};
static_assert(300 * sizeof(KeptEntry) + 40 * sizeof(GroupOptions) <= kLongTable);

/// A thread's elements of a block, four neighboring ones in each vector.
struct Elements {
  float param[kVectors][kVector];
  float grad[kVectors][kVector];
  float exp_avg[kVectors][kVector];
  float exp_avg_sq[kVectors][kVector];
};

/// One block of a parameter, for the threads of a warp.
struct KeptBlock {
  const KeptEntry& entry;
  std::int64_t block;
  std::int64_t start;
  int numel;
  int lane;

  __device__ bool has_codes() const { return entry.kept.scales[0] != nullptr; }
  __device__ std::uint8_t* codes(int s) const {
    return static_cast<std::uint8_t*>(entry.tensors[1 + s]) + start;
  }
  __device__ TensorChunk tensor(int i, std::uint32_t dtype) const {
    return TensorChunk(entry.tensors[i], dtype, start);
  }
  __device__ int index(int vector) const { return (vector * kWarp + lane) * kVector; }
  /// The elements from a vector's first one on; none if it is below 1. It is not cut to kVector:
  /// nvcc 13.0 made one instruction of both limits (VIMNMX.RELU of sm_90) with one predicate for
  /// two conditions, and read four elements where one was left.
  __device__ int count(int vector) const { return numel - index(vector); }

  /// Reads all tensors before it uses the first.
  __device__ void read(Elements& found) const {
    Raw raws[kVectors][4];
    Four<std::int16_t> lows[kVectors] = {};
    Four<std::uint8_t> bytes[kVectors][2] = {};
    const TensorChunk param = tensor(0, entry.param_dtype);
    const TensorChunk grad = tensor(3, entry.grad_dtype);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int i = index(v);
      param.load(i, count(v), raws[v][0]);
      grad.load(i, count(v), raws[v][3]);
      if (entry.kept.low != nullptr) lows[v] = load_four(entry.kept.low + start + i, count(v));
      for (int s = 0; s < 2; ++s)
        if (has_codes())
          bytes[v][s] = load_four<std::uint8_t>(codes(s) + i, count(v));
        else
          tensor(1 + s, entry.state_dtype).load(i, count(v), raws[v][1 + s]);
    }
    const float first = has_codes() ? entry.kept.scales[0][block] : 0;
    const float second = has_codes() ? entry.kept.scales[1][block] : 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      param.widen(raws[v][0], found.param[v]);
      grad.widen(raws[v][3], found.grad[v]);
      if (!has_codes()) {
        tensor(1, entry.state_dtype).widen(raws[v][1], found.exp_avg[v]);
        tensor(2, entry.state_dtype).widen(raws[v][2], found.exp_avg_sq[v]);
      }
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        if (entry.kept.low != nullptr)
          found.param[v][k] = join(
              {static_cast<std::uint16_t>(bits_of(found.param[v][k]) >> 16), lows[v].values[k]});
        if (!has_codes()) continue;
        found.exp_avg[v][k] = decode_signed(bytes[v][0].values[k], first);
        found.exp_avg_sq[v][k] = decode_unsigned(bytes[v][1].values[k], second);
      }
    }
  }

  __device__ void write(const Elements& made, std::uint32_t key, bool write_grads) const {
    if (write_grads)
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        tensor(3, entry.grad_dtype).store(made.grad[v], index(v), count(v));
    write_weights(made, key);
    if (has_codes())
      write_codes(made, key);
    else
      write_moments(made, key);
  }

 private:
  /// With lower halves to the nearest, without them randomly.
  __device__ void write_weights(const Elements& made, std::uint32_t key) const {
    auto* const to = static_cast<std::uint16_t*>(entry.tensors[0]) + start;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (entry.kept.low == nullptr) {
        store(0, entry.param_dtype, made.param[v], v, made.exp_avg[v], key, 0);
        continue;
      }
      Four<std::uint16_t> highs;
      Four<std::int16_t> lows;
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const Halves halves = split(made.param[v][k]);
        highs.values[k] = halves.high;
        lows.values[k] = halves.low;
      }
      store_four(highs, to + index(v), count(v));
      store_four(lows, entry.kept.low + start + index(v), count(v));
    }
  }

  /// The first moment to the nearest, the second randomly.
  __device__ void write_moments(const Elements& made, std::uint32_t key) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      tensor(1, entry.state_dtype).store(made.exp_avg[v], index(v), count(v));
      store(2, entry.state_dtype, made.exp_avg_sq[v], v, made.exp_avg[v], key, 16);
    }
  }

  /// Writes a vector of float32, or rounds it to bfloat16 by 16 bits of noise from `shift` on.
  __device__ void store(int i, std::uint32_t dtype, const float* values, int vector,
                        const float* exp_avg, std::uint32_t key, int shift) const {
    if (static_cast<DType>(dtype) == DType::kFloat32)
      return tensor(i, dtype).store(values, index(vector), count(vector));
    Four<std::uint16_t> rounded;
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      rounded.values[k] = round_randomly(values[k], noise_of(exp_avg[k], key) >> shift);
    auto* const to = static_cast<std::uint16_t*>(entry.tensors[i]) + start;
    store_four(rounded, to + index(vector), count(vector));
  }

  __device__ void write_codes(const Elements& made, std::uint32_t key) const {
    const auto by_first = scale_of_block<SignedCode>(largest_of(made.exp_avg));
    const auto by_second = scale_of_block<UnsignedCode>(largest_of(made.exp_avg_sq));
    if (lane == 0) {
      entry.kept.scales[0][block] = by_first.scale;
      entry.kept.scales[1][block] = by_second.scale;
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Four<std::uint8_t> first;
      Four<std::uint8_t> second;
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const std::uint32_t noise = noise_of(made.exp_avg[v][k], key);
        first.values[k] = encode_signed(made.exp_avg[v][k], by_first.inverse);
        second.values[k] = encode_unsigned(made.exp_avg_sq[v][k], by_second.inverse, noise);
      }
      store_four<std::uint8_t>(first, codes(0) + index(v), count(v));
      store_four<std::uint8_t>(second, codes(1) + index(v), count(v));
    }
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
constexpr int kKeptBlocksPerProcessor = 2;

/// One block of threads updates one chunk of whole blocks of elements.
template <std::size_t kBytes>
__global__ void __launch_bounds__(kThreads, kKeptBlocksPerProcessor)
    kept_kernel(const UpdateTable<KeptEntry, kBytes> __grid_constant__ table, UpdateSpec spec) {
  __shared__ Kind::Terms terms;
  if (is_skipped(spec)) return;
  const Place place = table.place(blockIdx.x);
  const KeptEntry& entry = table.entries()[place.entry];
  if (threadIdx.x == 0) terms = terms_of<Kind>(table, entry);
  __syncthreads();
  const Kind::Terms own = terms;  // in registers
  const std::uint32_t key = key_of(entry.kept.seed, step_of(entry.step));
  const float factor = factor_of(spec);
  const Blocks blocks(entry.kept.row);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const auto last = (place.start + place.numel) / kBlockSize;
  for (std::int64_t i = place.start / kBlockSize + warp; i < last; i += kThreads / kWarp) {
    const KeptBlock block{entry, i, blocks.start(i), blocks.numel(i),
                          static_cast<int>(threadIdx.x) % kWarp};
    Elements elements;
    block.read(elements);
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        float states[kMaxStates] = {elements.exp_avg[v][k], elements.exp_avg_sq[v][k], 0};
        elements.grad[v][k] = product(elements.grad[v][k], factor);
        Kind::apply(own, elements.grad[v][k], elements.param[v][k], states);
        elements.exp_avg[v][k] = states[0];
        elements.exp_avg_sq[v][k] = states[1];
      }
    block.write(elements, key, spec.write_grads && factor != 1.0F);
  }
}

}  // namespace

void check_kept_kernel() {
  check_kernel("kept_kernel", kept_kernel<kLongTable>);
  check_kernel("kept_kernel", kept_kernel<kShortTable>);
}

void launch_kept(const UpdateList& list, const UpdateSpec& spec, cudaStream_t stream) {
  Launcher<KeptEntry> launcher("kept_kernel", kept_kernel<kLongTable>, kept_kernel<kShortTable>,
                               list, spec, stream);
  for (std::size_t i = 0; i < list.parameters.size(); ++i) {
    const ParameterView& view = list.parameters[i];
    const std::int64_t blocks = Blocks(list.kept[i].row).count(view.numel);
    launcher.add({{}, list.kept[i]}, view, blocks * kBlockSize);
  }
  launcher.flush();
}

}  // namespace fastamp
