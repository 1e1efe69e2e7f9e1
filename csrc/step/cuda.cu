// The GPU's passes over the gradients. Launches on the caller's stream only, allocates nothing,
// reads nothing back, and uses no atomics: the order of addition is that of step/math.h.
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "step/convert.cuh"
#include "step/device.h"
#include "step/math.h"
#include "step/ops.h"
#include "step/table.cuh"

namespace fastamp {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = kWarp * static_cast<int>(kStripsPerChunk);  // one warp for each strip
constexpr int kVectorBytes = 16;                                     // of one load or store
constexpr int kUnroll = 8;                                           // loads in flight per thread

struct Entry {
  void* data;
  std::uint32_t first_chunk;
  std::uint32_t tail_numel : 24;  // elements of the last chunk
  std::uint32_t dtype : 8;
};
constexpr int kMaxEntries = 2000;
constexpr int kOldestDriver = 12010;  // takes more than 4 KiB of arguments
static_assert(sizeof(Table<Entry, kMaxEntries>) + 64 <= 32764, "a kernel's arguments");

struct Chunk {
  void* data;
  int numel;
  DType dtype;
};

template <int kMax>
__device__ Chunk find_chunk(const Table<Entry, kMax>& table, std::uint32_t index) {
  const std::uint32_t found = find_entry(table, index);
  const Entry& entry = table.entries[found];
  const std::uint32_t end =
      found + 1 < table.count ? table.entries[found + 1].first_chunk : table.num_chunks;
  const auto dtype = static_cast<DType>(entry.dtype);
  const std::int64_t offset =
      static_cast<std::int64_t>(index - entry.first_chunk) * kChunk * size_of(dtype);
  const int numel = index + 1 == end ? static_cast<int>(entry.tail_numel) : int{kChunk};
  return {static_cast<char*>(entry.data) + offset, numel, dtype};
}

/// The one place that turns a DType into a type.
template <typename Fn>
__device__ auto visit_dtype(DType dtype, Fn fn) {
  switch (dtype) {
    case DType::kBFloat16:
      return fn(__nv_bfloat16{});
    case DType::kFloat16:
      return fn(__half{});
    case DType::kFloat32:
      break;
  }
  return fn(float{});
}

template <typename T>
struct alignas(kVectorBytes) Vector {
  static constexpr int kSize = kVectorBytes / static_cast<int>(sizeof(T));
  T values[kSize];
};

/// Returns how many elements lie before the first that a vector can begin with.
template <typename T>
__device__ int count_head(const T* data, int numel) {
  constexpr int kSize = Vector<T>::kSize;
  const auto past = reinterpret_cast<std::uintptr_t>(data) % kVectorBytes / sizeof(T);
  const int head = (kSize - static_cast<int>(past)) % kSize;
  return head < numel ? head : numel;
}

template <typename Norm>
__device__ double join_halves(double* lanes, int count) {
  for (int half = count / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = Norm::join(lanes[i], lanes[i + half]);
  return lanes[0];
}

/// x in float64; or |x| by moving bits, since the conversion occupies what little float64 hardware
/// most GPUs have. That takes zeros and normal numbers; for others `refused` ends up other than 0.
template <bool kMoveBits>
struct Widen {
  std::uint32_t refused = 0;

  __device__ double operator()(float x) {
    if constexpr (!kMoveBits) return static_cast<double>(x);
    constexpr std::uint32_t kSmallest = 1U << 23;  // normal number
    constexpr std::uint32_t kBias = (1023U - 127U) << 20;
    const std::uint32_t bits = __float_as_uint(x) & 0x7fffffffU;
    const bool normal = bits - kSmallest < (254U << 23);
    refused |= normal ? 0U : bits;
    return __hiloint2double(normal ? static_cast<int>((bits >> 3) + kBias) : 0,
                            static_cast<int>(bits << 29));
  }
};

/// Adds the part of a strip that is this thread's to its lanes, with kRows loads in flight. Vectors
/// begin `head` elements into the strip; the elements before them are the last thread's.
template <typename Norm, int kRows, typename T, bool kMoveBits>
FASTAMP_INLINE __device__ void add_strip(const T* data, int numel, int head,
                                         Widen<kMoveBits>& widen, double* lanes) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kLanes = kWarp * kSize;
  const int thread = static_cast<int>(threadIdx.x) % kWarp;
  const auto add = [&](int lane, T x) {
    lanes[lane] = Norm::join(lanes[lane], Norm::term(widen(to_float(x))));
  };
#pragma unroll
  for (int i = 0; i < kSize; ++i) lanes[i] = 0;
  if (thread == kWarp - 1)
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      if (i >= kSize - head) add(i, data[i - (kSize - head)]);
  const int first = thread * kSize;
  int start = head;
#pragma unroll kRows
  for (; start + kLanes <= numel; start += kLanes) {
    const auto row = *reinterpret_cast<const Vector<T>*>(data + start + first);
#pragma unroll
    for (int i = 0; i < kSize; ++i) add(i, row.values[i]);
  }
  for (; start < numel; start += kLanes)
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      if (start + first + i < numel) add(i, data[start + first + i]);
}

/// Moves lanes, of which each thread of a warp has kSize, up by `count` < kSize in a circle.
template <int kSize>
__device__ void rotate(double* lanes, int count) {
  const int before = static_cast<int>(threadIdx.x + kWarp - 1) % kWarp;
#pragma unroll
  for (int step = kSize / 2; step > 0; step /= 2) {
    if ((count & step) == 0) continue;
    double moved[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      moved[i] =
          i < step ? __shfl_sync(0xffffffffU, lanes[kSize - step + i], before) : lanes[i - step];
#pragma unroll
    for (int i = 0; i < kSize; ++i) lanes[i] = moved[i];
  }
}

/// Reduces one strip with one warp; thread t holds the lanes t * kSize to (t + 1) * kSize - 1, in
/// the end. Where vectors begin `head` elements into the strip, it holds those `head` further until
/// then. The result is thread 0's.
template <typename Norm, typename T>
__device__ double reduce_strip(const T* data, int numel) {
  constexpr int kSize = Vector<T>::kSize;
  const int head = count_head(data, numel);
  double lanes[kSize];
  Widen<FASTAMP_SLOW_FLOAT64> widen;
  add_strip<Norm, kUnroll>(data, numel, head, widen, lanes);
  if (widen.refused != 0) {  // subnormal numbers, infinity, NaN
    Widen<false> convert;
    add_strip<Norm, 1>(data, numel, head, convert, lanes);
  }
  rotate<kSize>(lanes, head);
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      lanes[i] = Norm::join(lanes[i], __shfl_down_sync(0xffffffffU, lanes[i], offset));
#pragma unroll
  for (int half = kSize / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) lanes[i] = Norm::join(lanes[i], lanes[i + half]);
  return lanes[0];
}

/// One block reduces one chunk into partial[blockIdx.x].
template <typename Norm, int kMax>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const Table<Entry, kMax> __grid_constant__ table, double* partial) {
  __shared__ double strips[kStripsPerChunk];
  const Chunk chunk = find_chunk(table, blockIdx.x);
  const int strip = static_cast<int>(threadIdx.x) / kWarp;
  const int start = strip * static_cast<int>(kStrip);
  const int left = chunk.numel - start;
  const double sum = visit_dtype(chunk.dtype, [&](auto tag) {
    using T = decltype(tag);
    const int numel = left < kStrip ? left : static_cast<int>(kStrip);
    return left > 0 ? reduce_strip<Norm>(static_cast<const T*>(chunk.data) + start, numel) : 0.0;
  });
  if (threadIdx.x % kWarp == 0) strips[strip] = sum;
  __syncthreads();
  if (threadIdx.x == 0)
    partial[blockIdx.x] = join_halves<Norm>(strips, static_cast<int>(kStripsPerChunk));
}

/// One block of kFinalLanes threads joins the chunks and computes what the step needs.
template <typename Norm>
__global__ void __launch_bounds__(kFinalLanes)
    finish_kernel(double* work, std::int64_t num_chunks, ClipSpec clip, GradStats* stats) {
  __shared__ double lanes[kFinalLanes];
  const int lane = static_cast<int>(threadIdx.x);
  double sum = 0;
  for (std::int64_t i = lane; i < num_chunks; i += kFinalLanes) sum = Norm::join(sum, work[1 + i]);
  lanes[lane] = sum;
  for (int half = kFinalLanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) lanes[lane] = Norm::join(lanes[lane], lanes[lane + half]);
  }
  if (lane != 0) return;
  work[0] = lanes[0];
  *stats = finish<Norm>(lanes[0], clip);
}

template <typename T>
__device__ void rescale_chunk(T* data, int numel, float factor) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kStep = kThreads * kSize;
  const int thread = static_cast<int>(threadIdx.x);
  const auto rescale = [&](T& x) { from_float(to_float(x) * factor, &x); };
  int start = count_head(data, numel);
  if (thread < start) rescale(data[thread]);
#pragma unroll 4
  for (; start + kStep <= numel; start += kStep) {
    auto* place = reinterpret_cast<Vector<T>*>(data + start + thread * kSize);
    Vector<T> row = *place;
#pragma unroll
    for (int i = 0; i < kSize; ++i) rescale(row.values[i]);
    *place = row;
  }
  for (int i = start + thread; i < numel; i += kThreads) rescale(data[i]);
}

/// One block rescales one chunk.
template <int kMax>
__global__ void __launch_bounds__(kThreads)
    rescale_kernel(const Table<Entry, kMax> __grid_constant__ table, const float* factor) {
  const float value = *factor;
  if (value == 1.0F) return;
  const Chunk chunk = find_chunk(table, blockIdx.x);
  visit_dtype(chunk.dtype, [&](auto tag) {
    rescale_chunk(static_cast<decltype(tag)*>(chunk.data), chunk.numel, value);
  });
}

/// Calls use(table) for tables that hold all tensors: one up to kMaxEntries.
template <typename Use>
void for_each_table(const TensorList& tensors, const Use& use) {
  const auto add = [&](std::size_t i, auto* table) {
    const std::int64_t numel = tensors[i].numel;
    if (numel == 0) return;
    const std::int64_t chunks = chunks_of(numel);
    Entry& entry = table->entries[table->count++];
    entry.data = tensors[i].data;
    entry.first_chunk = table->num_chunks;
    entry.tail_numel = static_cast<std::uint32_t>(numel - (chunks - 1) * kChunk);
    entry.dtype = static_cast<std::uint32_t>(tensors[i].dtype);
    table->num_chunks += static_cast<std::uint32_t>(chunks);
  };
  fastamp::for_each_table<Entry, kMaxEntries>(tensors.size(), add, [&](const auto& table) {
    if (table.num_chunks > 0) use(table);
  });
}

template <typename Norm>
void launch_stats(const TensorList& tensors, const ClipSpec& clip, double* work, GradStats* stats,
                  cudaStream_t stream) {
  // One block per chunk: a chunk is 128 or 256 KiB, so large gradients fill the device many times
  // over and small tensors cost one block each.
  std::int64_t chunks = 0;
  for_each_table(tensors, [&](const auto& table) {
    constexpr int kMax = std::decay_t<decltype(table)>::kSize;
    launch("reduce_kernel", reduce_kernel<Norm, kMax>, table.num_chunks, kThreads, stream, table,
           work + 1 + chunks);
    chunks += table.num_chunks;
  });
  launch("finish_kernel", finish_kernel<Norm>, 1, kFinalLanes, stream, work, chunks, clip, stats);
}

void grad_stats(const TensorList& tensors, NormType norm_type, const ClipSpec& clip, double* work,
                GradStats* stats, const Launch& where) {
  const DeviceGuard guard(where.device_index);
  visit_norm(norm_type, [&](auto norm) {
    launch_stats<decltype(norm)>(tensors, clip, work, stats,
                                 static_cast<cudaStream_t>(where.stream));
  });
}

void rescale(const TensorList& tensors, const float* factor, const Launch& where) {
  const DeviceGuard guard(where.device_index);
  for_each_table(tensors, [&](const auto& table) {
    constexpr int kMax = std::decay_t<decltype(table)>::kSize;
    launch("rescale_kernel", rescale_kernel<kMax>, table.num_chunks, kThreads,
           static_cast<cudaStream_t>(where.stream), table, factor);
  });
}

template <typename Norm, int... kMax>
void check_kernels(std::integer_sequence<int, kMax...>) {
  (check_kernel("reduce_kernel", reduce_kernel<Norm, kMax>), ...);
  check_kernel("finish_kernel", finish_kernel<Norm>);
  (check_kernel("rescale_kernel", rescale_kernel<kMax>), ...);
}

}  // namespace

void check_device(int device_index) {
  int driver = 0;
  check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  if (driver < kOldestDriver)
    throw std::runtime_error("the NVIDIA driver is for CUDA " + std::to_string(driver / 1000) +
                             "." + std::to_string(driver % 1000 / 10) +
                             ", and the kernels need one for 12.1 or later; update the driver");
  try {
    const DeviceGuard guard(device_index);
    for (const NormType norm_type : {NormType::kL1, NormType::kL2, NormType::kInf})
      visit_norm(norm_type,
                 [](auto norm) { check_kernels<decltype(norm)>(TableSizes<kMaxEntries>{}); });
    check_update_kernels();
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(error.what()) +
                             "; build fastamp on this machine with FASTAMP_CUDA=ON, or update the "
                             "NVIDIA driver if it is older than the nvcc");
  }
}

const OpTable& cuda_ops() {
  static constexpr OpTable table{grad_stats, rescale, update_on_cuda};
  return table;
}

bool built_with_cuda() { return true; }

}  // namespace fastamp
