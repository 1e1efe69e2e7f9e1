// The GPU's passes over the gradients. Launches on the caller's stream only, allocates nothing, and
// reads nothing back; the order of addition is that of step/math.h. Where float64 is slow, pairs of
// float32 are summed instead, and again in that order if the norm's last bit may depend on it.
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "step/convert.cuh"
#include "step/device.h"
#include "step/math.h"
#include "step/ops.h"
#include "step/strips.cuh"
#include "step/table.cuh"

namespace fastamp {
namespace {

constexpr int kThreads = kWarp * static_cast<int>(kStripsPerChunk);  // one warp for each strip

/// How a kernel adds: in order; in pairs of float32; in order after pairs were not enough.
enum class Sums { kInOrder, kInPairs, kAgain };

template <typename Norm>
constexpr bool kHasPairs = std::is_same_v<typename Norm::Sum, double>;

struct Entry {
  void* data;
  std::uint32_t first_chunk;
  std::uint32_t tail_numel : 24;  // elements of the last chunk
  std::uint32_t dtype : 8;
};
constexpr int kMaxEntries = 2000;
constexpr int kOldestDriver = 12010;  // the first for more than 4 KiB of arguments
static_assert(sizeof(Table<Entry, kMaxEntries>) + 64 <= kMaxArguments);

struct Chunk {
  void* data;
  int numel;
  DType dtype;
};

template <int kMax>
__device__ Chunk find_chunk(const Table<Entry, kMax>& table, std::uint32_t index) {
  const std::uint32_t found = find_entry(table.entries, table.count, index);
  const Entry& entry = table.entries[found];
  const std::uint32_t end =
      found + 1 < table.count ? table.entries[found + 1].first_chunk : table.num_chunks;
  const auto dtype = static_cast<DType>(entry.dtype);
  const std::int64_t offset =
      static_cast<std::int64_t>(index - entry.first_chunk) * kChunk * size_of(dtype);
  const int numel = index + 1 == end ? static_cast<int>(entry.tail_numel) : int{kChunk};
  return {static_cast<char*>(entry.data) + offset, numel, dtype};
}

/// Reduces one chunk with one block. The result is thread 0's.
template <typename Norm, Sums kSums, int kMax>
__device__ double reduce_chunk(const Table<Entry, kMax>& table) {
  __shared__ double strips[kStripsPerChunk];
  const Chunk chunk = find_chunk(table, blockIdx.x);
  const int strip = static_cast<int>(threadIdx.x) / kWarp;
  const int start = strip * static_cast<int>(kStrip);
  const int left = chunk.numel - start;
  const double sum = visit_dtype(chunk.dtype, [&](auto tag) {
    const auto* data = static_cast<const decltype(tag)*>(chunk.data) + start;
    const int numel = left < kStrip ? left : static_cast<int>(kStrip);
    if (left <= 0) return 0.0;
    if constexpr (kSums == Sums::kInPairs) return reduce_in_pairs<Norm>(data, numel);
    return reduce_in_order<Norm, kSums == Sums::kAgain ? 1 : kUnroll>(data, numel);
  });
  if (threadIdx.x % kWarp == 0) strips[strip] = sum;
  __syncthreads();
  return threadIdx.x == 0 ? join_halves<Norm, kStripsPerChunk>(strips) : 0;
}

/// Joins the chunks with one block. The result is thread 0's.
template <typename Norm>
__device__ double join_chunks(const double* partial, std::int64_t num_chunks) {
  __shared__ double lanes[kFinalLanes];
  const auto threads = static_cast<int>(blockDim.x);
  const auto thread = static_cast<int>(threadIdx.x);
  for (int lane = thread; lane < kFinalLanes; lane += threads) {
    double sum = 0;
    for (std::int64_t i = lane; i < num_chunks; i += kFinalLanes) sum = Norm::join(sum, partial[i]);
    lanes[lane] = sum;
  }
  for (int half = kFinalLanes / 2; half > 0; half /= 2) {
    __syncthreads();
    for (int lane = thread; lane < half; lane += threads)
      lanes[lane] = Norm::join(lanes[lane], lanes[lane + half]);
  }
  return thread == 0 ? lanes[0] : 0;
}

/// One block reduces one chunk into partial[blockIdx.x].
template <typename Norm, Sums kSums, int kMax>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const Table<Entry, kMax> __grid_constant__ table, double* partial) {
  const double sum = reduce_chunk<Norm, kSums>(table);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

/// One block of kFinalLanes threads joins the chunks and computes what the step needs. If chunks in
/// pairs leave the norm uncertain, it sets work[0] to -1, which requests them again.
template <typename Norm, Sums kSums>
__global__ void __launch_bounds__(kFinalLanes)
    finish_kernel(double* work, std::int64_t num_chunks, ClipSpec clip, GradStats* stats) {
  const double reduced = join_chunks<Norm>(work + 1, num_chunks);
  if (threadIdx.x != 0) return;
  if constexpr (kSums == Sums::kInPairs)
    if (num_chunks > 0 && !is_certain<Norm>(reduced, clip)) {
      work[0] = -1;
      return;
    }
  work[0] = reduced;
  *stats = finish<Norm>(reduced, clip);
}

/// Does nothing unless finish_kernel requests it. Then each block reduces one chunk in order and
/// counts work[0] down, from -1; the last block of all tables finishes.
template <typename Norm, int kMax>
__global__ void __launch_bounds__(kThreads)
    again_kernel(const Table<Entry, kMax> __grid_constant__ table, std::int64_t first, double* work,
                 std::int64_t num_chunks, ClipSpec clip, GradStats* stats) {
  __shared__ bool is_last;
  if (!(work[0] < 0)) return;
  const double sum = reduce_chunk<Norm, Sums::kAgain>(table);
  if (threadIdx.x == 0) {
    work[1 + first + blockIdx.x] = sum;
    __threadfence();  // whoever sees the count sees the sum
    is_last = atomicAdd(work, -1.0) == static_cast<double>(-num_chunks);
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const double reduced = join_chunks<Norm>(work + 1, num_chunks);
  if (threadIdx.x != 0) return;
  work[0] = reduced;
  *stats = finish<Norm>(reduced, clip);
}

template <typename T>
__device__ __attribute__((noinline)) void rescale_chunk(T* data, int numel, float factor) {
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

/// Calls use(table) for tables that hold all tensors: one table for up to kMaxEntries.
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

/// Says whether a device has few float64 units: 2 for each multiprocessor in place of 32 or 64.
bool has_slow_float64(int device_index) {
  int ratio = 0;
  check_cuda(
      cudaDeviceGetAttribute(&ratio, cudaDevAttrSingleToDoublePrecisionPerfRatio, device_index),
      "cudaDeviceGetAttribute");
  return ratio > 4;
}

template <typename Norm, Sums kSums>
void launch_stats(const TensorList& tensors, const ClipSpec& clip, double* work, GradStats* stats,
                  cudaStream_t stream) {
  // One block per chunk: a chunk is 128 or 256 KiB, so large gradients fill the device many times
  // over and small tensors cost one block each.
  std::int64_t chunks = 0;
  for_each_table(tensors, [&](const auto& table) {
    constexpr int kMax = std::decay_t<decltype(table)>::kSize;
    launch("reduce_kernel", reduce_kernel<Norm, kSums, kMax>, table.num_chunks, kThreads, stream,
           table, work + 1 + chunks);
    chunks += table.num_chunks;
  });
  launch("finish_kernel", finish_kernel<Norm, kSums>, 1, kFinalLanes, stream, work, chunks, clip,
         stats);
  if constexpr (kSums == Sums::kInPairs) {
    std::int64_t first = 0;
    for_each_table(tensors, [&](const auto& table) {
      constexpr int kMax = std::decay_t<decltype(table)>::kSize;
      launch("again_kernel", again_kernel<Norm, kMax>, table.num_chunks, kThreads, stream, table,
             first, work, chunks, clip, stats);
      first += table.num_chunks;
    });
  }
}

void grad_stats(const TensorList& tensors, NormType norm_type, const ClipSpec& clip, double* work,
                GradStats* stats, const Launch& where) {
  const DeviceGuard guard(where.device_index);
  const bool slow = has_slow_float64(where.device_index);
  visit_norm(norm_type, [&](auto norm) {
    using Norm = decltype(norm);
    auto* stream = static_cast<cudaStream_t>(where.stream);
    if constexpr (kHasPairs<Norm>)
      if (slow) return launch_stats<Norm, Sums::kInPairs>(tensors, clip, work, stats, stream);
    launch_stats<Norm, Sums::kInOrder>(tensors, clip, work, stats, stream);
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
  (check_kernel("reduce_kernel", reduce_kernel<Norm, Sums::kInOrder, kMax>), ...);
  check_kernel("finish_kernel", finish_kernel<Norm, Sums::kInOrder>);
  if constexpr (kHasPairs<Norm>) {
    (check_kernel("reduce_kernel", reduce_kernel<Norm, Sums::kInPairs, kMax>), ...);
    check_kernel("finish_kernel", finish_kernel<Norm, Sums::kInPairs>);
    (check_kernel("again_kernel", again_kernel<Norm, kMax>), ...);
  }
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
