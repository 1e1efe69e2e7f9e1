// The GPU's update: one pass over parameters, gradients and states, a block of threads for each
// chunk of a parameter, all groups and dtypes together. Nothing is read back. Lean parameters,
// which are not plain, have a kernel of their own: a warp for each block of 256 elements, so that
// the largest values of a block meet in the warp's registers.
#include <cstdint>

#include "step/device.h"
#include "step/formats.h"
#include "step/ops.h"
#include "step/rules.h"
#include "step/table.cuh"
#include "step/vectors.cuh"

namespace fastamp {
namespace {

constexpr int kThreads = 256;

/// A plain parameter. Its gradient is the last tensor, behind the states.
template <int kCount>
struct Entry : Chunked {
  static constexpr bool kIsLean = false;
  static constexpr int kVectors = 1;             // of a thread at once
  static constexpr int kBlocksPerProcessor = 4;  // 1,024 threads, see vectors.cuh
  static constexpr std::int16_t* low = nullptr;
  static constexpr std::uint32_t row = 1;
  static constexpr bool is_random = false;
  __device__ static float* scales_of(int) { return nullptr; }

  void* tensors[2 + kCount];
  float* step;

  void fill(const ParameterView& view) {
    param_format = static_cast<std::uint32_t>(view.param.format) & 3U;
    grad_format = static_cast<std::uint32_t>(view.grad.format) & 3U;
    state_format = static_cast<std::uint32_t>(view.states[0].format) & 3U;
    tensors[0] = view.param.data;
    for (int s = 0; s < kCount; ++s) tensors[1 + s] = view.states[s].data;
    tensors[1 + kCount] = view.grad.data;
    step = view.step;
  }
};

/// A lean one. Codes stand in the states' places.
template <int kCount>
struct LeanEntry : Entry<kCount> {
  static constexpr bool kIsLean = true;
  static constexpr int kVectors = static_cast<int>(kBlockSize) / (kWarp * kVector);
  // A thread has two vectors of each tensor in flight, 64 bytes where all are short, so that 512
  // threads ask for the 27 KB of vectors.cuh. With more of them its values would not fit into
  // registers.
  static constexpr int kBlocksPerProcessor = 2;
  __device__ float* scales_of(int s) const { return scales[s]; }

  float* scales[kCount > 0 ? kCount : 1];  // null: the states are floats
  std::int16_t* low;
  std::uint32_t row;
  std::uint32_t seed;
  bool is_random;  // whether the parameter is rounded randomly

  void fill(const ParameterView& view) {
    Entry<kCount>::fill(view);
    for (int s = 0; s < kCount; ++s) scales[s] = view.states[s].scales;
    low = view.low;
    row = view.row;
    seed = view.seed;
    is_random = view.param.is_random;
  }
};

/// A thread's elements of one block of a parameter, four neighboring ones in each vector. Tensor 0
/// is the parameter, the states follow, and the gradient is the last.
template <typename Kind, typename Entry>
struct Elements {
  static constexpr int kVectors = Entry::kVectors;
  static constexpr int kGrad = 1 + Kind::kStates;
  using Values = float[2 + Kind::kStates][kVectors][kVector];
  using Noise = std::uint32_t[kVectors][kVector];

  const Entry& entry;
  Block block;
  int first;  // in the block

  /// Reads all tensors before it uses the first.
  __device__ void read(Values& values) const {
    Raw raws[kGrad + 1][kVectors];
    Four<std::int16_t> lows[kVectors] = {};
    float scales[kGrad] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i <= kGrad; ++i)
        visit(i, [&](auto tag) { load(begin_of<decltype(tag)>(i), v, raws[i][v].of(tag)); });
      if (entry.low != nullptr) load(entry.low + block.start, v, lows[v]);
    }
    for (int s = 0; s < Kind::kStates && has_codes(1); ++s)
      scales[s] = entry.scales_of(s)[block.number];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i <= kGrad; ++i)
        if (has_codes(i))
          visit_code(Kind::code_of(i - 1), [&](auto code) {
#pragma unroll
            for (int k = 0; k < kVector; ++k)
              values[i][v][k] = decode<decltype(code)>(raws[i][v].codes.values[k], scales[i - 1]);
          });
        else
          visit_format(format_of(i), [&](auto tag) {
#pragma unroll
            for (int k = 0; k < kVector; ++k)
              values[i][v][k] = to_float(raws[i][v].of(tag).values[k]);
          });
      if (entry.low != nullptr)
#pragma unroll
        for (int k = 0; k < kVector; ++k)
          values[0][v][k] =
              join({static_cast<std::uint16_t>(bits_of(values[0][v][k]) >> 16), lows[v].values[k]});
    }
  }

  __device__ void write(const Values& values, std::uint32_t key, bool write_grads) const {
    Noise noise = {};
    if (Entry::kIsLean) fill_noise(values, key, noise);
    if (write_grads) store_floats(kGrad, values, false, noise, 0);
    if (entry.low == nullptr) {
      store_floats(0, values, entry.is_random, noise, 0);
    } else {
      const auto halves = [&](int v, int k) { return split(values[0][v][k]); };
      store(begin_of<std::uint16_t>(0), [&](int v, int k) { return halves(v, k).high; });
      store(entry.low + block.start, [&](int v, int k) { return halves(v, k).low; });
    }
#pragma unroll
    for (int s = 0; s < Kind::kStates; ++s)
      if (has_codes(1 + s))
        store_codes(s, values[1 + s], noise);
      else
        store_floats(1 + s, values, Entry::kIsLean && Kind::is_random(s), noise, 16);
  }

 private:
  __device__ bool has_codes(int i) const {
    return i > 0 && i < kGrad && entry.scales_of(0) != nullptr;
  }
  __device__ Format format_of(int i) const {
    return static_cast<Format>(i == 0       ? entry.param_format
                               : i == kGrad ? entry.grad_format
                                            : entry.state_format);
  }
  template <typename Fn>
  __device__ void visit(int i, Fn fn) const {
    if (has_codes(i))
      fn(std::uint8_t{});
    else
      visit_format(format_of(i), fn);
  }
  template <typename T>
  __device__ T* begin_of(int i) const {
    return static_cast<T*>(entry.tensors[i]) + block.start;
  }
  __device__ int index(int vector) const { return first + vector * kWarp * kVector; }
  /// The elements from a vector's first one on; none if it is below 1. It is not cut to kVector:
  /// nvcc 13.0 made one instruction of both limits (VIMNMX.RELU of sm_90) with one predicate for
  /// two conditions, and read four elements where one was left.
  __device__ int count(int vector) const { return block.numel - index(vector); }
  template <typename T>
  __device__ bool is_whole(const T* tensor, int v) const {
    return reinterpret_cast<std::uintptr_t>(tensor) % sizeof(Four<T>) == 0 && count(v) >= kVector;
  }

  /// Reads misaligned elements one by one; the next ones come from the cache.
  template <typename T>
  __device__ void load(const T* from, int v, Four<T>& to) const {
    if (is_whole(from, v)) {
      to = *reinterpret_cast<const Four<T>*>(from + index(v));
      return;
    }
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      if (k < count(v)) to.values[k] = from[index(v) + k];
  }

  /// Writes value_of(vector, k) of all elements.
  template <typename T, typename Fn>
  __device__ void store(T* to, Fn value_of) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Four<T> made;
#pragma unroll
      for (int k = 0; k < kVector; ++k) made.values[k] = value_of(v, k);
      if (is_whole(to, v)) {
        *reinterpret_cast<Four<T>*>(to + index(v)) = made;
        continue;
      }
#pragma unroll
      for (int k = 0; k < kVector; ++k)
        if (k < count(v)) to[index(v) + k] = made.values[k];
    }
  }

  /// Writes floats to the nearest, or rounds them to bfloat16 by 16 bits of noise from `shift` on.
  __device__ void store_floats(int i, const Values& values, bool is_random, const Noise& noise,
                               int shift) const {
    if (is_random && format_of(i) == Format::kBFloat16)
      return store(begin_of<std::uint16_t>(i), [&](int v, int k) {
        return round_randomly(values[i][v][k], noise[v][k] >> shift);
      });
    visit_format(format_of(i), [&](auto tag) {
      store(begin_of<decltype(tag)>(i), [&](int v, int k) {
        decltype(tag) rounded;
        from_float(values[i][v][k], &rounded);
        return rounded;
      });
    });
  }

  __device__ void store_codes(int s, const float (&values)[kVectors][kVector],
                              const Noise& noise) const {
    visit_code(Kind::code_of(s), [&](auto code) {
      using Code = decltype(code);
      const auto scale = scale_of_block<Code>(largest_of(values));
      if (first == 0) entry.scales_of(s)[block.number] = scale.scale;
      store(begin_of<std::uint8_t>(1 + s), [&](int v, int k) {
        const std::uint32_t rounding = Kind::is_random(s) ? rounding_of(noise[v][k]) : kNearest;
        return encode<Code>(values[v][k], scale.inverse, rounding);
      });
    });
  }

  /// Fills in the random bits of all elements. Blocks of codes lie within a row.
  __device__ void fill_noise(const Values& values, std::uint32_t key, Noise& noise) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      std::uint32_t place = block.place + static_cast<std::uint32_t>(index(v));
      if (!has_codes(1)) place %= entry.row;
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const float state = Kind::kStates > 0 ? values[1][v][k] : 0;
        noise[v][k] = noise_of(state, values[0][v][k], place, key);
        place = place + 1 == entry.row ? 0 : place + 1;
      }
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
      const std::uint32_t other = __shfl_sync(kWholeWarp, largest, (first / kVector) ^ offset);
      largest = other > largest ? other : largest;
    }
    return largest;
  }
};

/// Updates a thread's elements of one block.
template <typename Kind, typename Entry>
__device__ void update_elements(const Elements<Kind, Entry>& elements,
                                const typename Kind::Terms& terms, float factor, std::uint32_t key,
                                bool write_grads) {
  constexpr int kGrad = 1 + Kind::kStates;
  typename Elements<Kind, Entry>::Values values;
  elements.read(values);
#pragma unroll
  for (int v = 0; v < Entry::kVectors; ++v)
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      float states[kMaxStates] = {};
#pragma unroll
      for (int s = 0; s < Kind::kStates; ++s) states[s] = values[1 + s][v][k];
      values[kGrad][v][k] = product(values[kGrad][v][k], factor);
      Kind::apply(terms, values[kGrad][v][k], values[0][v][k], states);
#pragma unroll
      for (int s = 0; s < Kind::kStates; ++s) values[1 + s][v][k] = states[s];
    }
  elements.write(values, key, write_grads);
}

/// One block of threads updates one chunk. Neighboring threads have neighboring vectors; of lean
/// parameters a warp has one block of elements after the other.
template <typename Kind, typename Table, typename Entry = typename Table::Entry>
__global__ void __launch_bounds__(kThreads, Entry::kBlocksPerProcessor)
    update_kernel(const Table __grid_constant__ table, UpdateSpec spec) {
  __shared__ typename Kind::Terms terms;
  if (is_skipped(spec)) return;
  const Place place = table.place(blockIdx.x);
  const Entry& entry = table.entries()[place.entry];
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    GroupOptions options = table.group(entry.group);
    if (options.lr_on_device != nullptr) options.lr = *options.lr_on_device;
    terms = Kind::terms(options, step_of(entry.step));
  }
  __syncthreads();
  const typename Kind::Terms own = terms;  // in registers
  const float factor = factor_of(spec);
  const bool write_grads = spec.write_grads && factor != 1.0F;
  if constexpr (Entry::kIsLean) {
    const std::uint32_t key = key_of(entry.seed, step_of(entry.step));
    const bool has_codes = Kind::kStates > 0 && entry.scales_of(0) != nullptr;
    const Blocks blocks(place.start, place.numel, entry.row, has_codes, kBlockSize);
    const int first = thread % kWarp * kVector;
    for (std::uint32_t i = threadIdx.x / kWarp; i < blocks.count(); i += kThreads / kWarp)
      update_elements(Elements<Kind, Entry>{entry, blocks[i], first}, own, factor, key,
                      write_grads);
  } else {
    const Block block{0, place.start, place.numel, 0};
    for (int i = thread * kVector; i < place.numel; i += kThreads * kVector)
      update_elements(Elements<Kind, Entry>{entry, block, i}, own, factor, 0, write_grads);
  }
}

/// Calls fn(kind, entry) for all kinds of rules, with each type of entry that they have.
template <typename Fn>
void for_each_kernel(Fn fn) {
  for_each_kind([&](auto kind) {
    using Kind = decltype(kind);
    if constexpr (Kind::kIsLean) fn(kind, LeanEntry<Kind::kStates>{});
    fn(kind, Entry<Kind::kStates>{});
  });
}

/// Returns the elements of a chunk, which a block of threads updates: of short lists fewer, so that
/// they fill the device, too. Each block computes its terms, which takes as long as 4,096 elements.
std::int64_t chunk_of(const UpdateList& list) {
  constexpr std::int64_t kManyBlocks = 1024;  // twice as many as run at once on an H200
  constexpr std::int64_t kSmallest = 4096;
  std::int64_t numel = 0;
  for (const ParameterView& view : list.parameters) numel += view.numel;
  std::int64_t chunk = kChunk;
  while (chunk > kSmallest && numel < kManyBlocks * chunk) chunk /= 2;
  return chunk;
}

}  // namespace

void check_update_kernels() {
  for_each_kernel([](auto kind, auto entry) {
    using Kind = decltype(kind);
    using Entry = decltype(entry);
    check_kernel("update_kernel", update_kernel<Kind, Table<Entry, kLongTable>>);
    check_kernel("update_kernel", update_kernel<Kind, Table<Entry, kShortTable>>);
  });
}

void update_on_cuda(const UpdateList& list, const UpdateSpec& spec, const Launch& where) {
  const DeviceGuard guard(where.device_index);
  const auto stream = static_cast<cudaStream_t>(where.stream);
  if (spec.counts) launch_count(list, spec.found_inf, stream);
  for_each_kernel([&](auto kind, auto entry) {
    using Kind = decltype(kind);
    using Entry = decltype(entry);
    if (Kind::kRule != list.rule) return;
    const auto fill = [&](auto add) {
      for (const ParameterView& view : list.parameters) {
        const GroupOptions& group = list.groups[view.group];
        if (view.is_plain() == Entry::kIsLean || !Kind::serves(group)) continue;
        Entry filled{};
        filled.fill(view);
        add(filled, room_of(view), &group);
      }
    };
    for_each_table<Entry>(chunk_of(list), fill, [&](const auto& table) {
      launch("update_kernel", update_kernel<Kind, std::decay_t<decltype(table)>>, table.num_chunks,
             kThreads, stream, table, spec);
    });
  });
}

}  // namespace fastamp
