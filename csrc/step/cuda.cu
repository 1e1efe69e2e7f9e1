// The GPU's passes over the gradients. Launches on the caller's stream only, allocates nothing, and
// reads nothing back; the order of addition is that of step/math.h.
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "step/device.h"
#include "step/math.h"
#include "step/ops.h"
#include "step/strips.cuh"
#include "step/table.cuh"

namespace fastamp {
namespace {

constexpr int kThreads = kWarp * static_cast<int>(kStripsPerChunk);  // one warp for each strip

// 768 threads with kRows vectors each have 96 KB in flight; memory that gives 5 TB/s after 0.7 us
// to 132 multiprocessors needs 27 KB on each, and 8 TB/s to 148 need 38. Three blocks leave a
// thread 80 registers, of which the vectors take 32.
constexpr int kBlocksPerProcessor = 3;

struct Entry : Chunked {
  void* data;
};

template <typename GradTable>
__device__ TensorView find_chunk(const GradTable& table) {
  const Place place = table.place(blockIdx.x);
  const Entry& entry = table.entries()[place.entry];
  const auto format = static_cast<Format>(entry.grad_format);
  return {static_cast<char*>(entry.data) + place.start * size_of(format), place.numel, format};
}

/// One block reduces one chunk into partial[blockIdx.x].
template <typename GradTable>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    reduce_kernel(const GradTable __grid_constant__ table, double* partial) {
  __shared__ double strips[kStripsPerChunk];
  const TensorView chunk = find_chunk(table);
  const int strip = static_cast<int>(threadIdx.x) / kWarp;
  const int start = strip * static_cast<int>(kStrip);
  const int left = static_cast<int>(chunk.numel) - start;
  const double sum = visit_format(chunk.format, [&](auto tag) {
    const auto* data = static_cast<const decltype(tag)*>(chunk.data) + start;
    const int numel = left < kStrip ? left : static_cast<int>(kStrip);
    return left > 0 ? reduce_strip(data, numel) : 0.0;
  });
  if (threadIdx.x % kWarp == 0) strips[strip] = sum;
  __syncthreads();
  if (threadIdx.x == 0) partial[blockIdx.x] = join_lanes<kStripsPerChunk>(strips);
}

/// Joins the chunks with one block. The result is every thread's.
__device__ double join_chunks(const double* work, std::int64_t num_chunks) {
  __shared__ double lanes[kFinalLanes];
  const auto threads = static_cast<int>(blockDim.x);
  const auto thread = static_cast<int>(threadIdx.x);
  for (int lane = thread; lane < kFinalLanes; lane += threads) {
    double sum = 0;
    for (std::int64_t i = lane; i < num_chunks; i += kFinalLanes) sum += work[1 + i];
    lanes[lane] = sum;
  }
  for (int half = kFinalLanes / 2; half > 1; half /= 2) {
    __syncthreads();
    for (int lane = thread; lane < half; lane += threads) lanes[lane] += lanes[lane + half];
  }
  __syncthreads();
  return lanes[0] + lanes[1];
}

/// One block of kFinalLanes threads joins the chunks, computes what the step needs, and counts the
/// step for the update that follows, unless it is skipped. Without `work` it only counts.
template <typename CountTable>
__global__ void __launch_bounds__(kFinalLanes)
    finish_kernel(const CountTable __grid_constant__ counts, double* work, std::int64_t num_chunks,
                  ClipSpec clip, GradStats* stats) {
  __shared__ bool is_skipped;
  const double reduced = join_chunks(work, num_chunks);
  if (threadIdx.x == 0) {
    const GradStats found = finish(reduced, clip);
    is_skipped = found.found_inf != 0;
    if (work != nullptr) {
      work[0] = reduced;
      *stats = found;
    }
  }
  __syncthreads();
  if (is_skipped) return;
  for (std::uint32_t i = threadIdx.x; i < counts.count; i += kFinalLanes) *counts.entries()[i] += 1;
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
template <typename GradTable>
__global__ void __launch_bounds__(kThreads)
    rescale_kernel(const GradTable __grid_constant__ table, const float* factor) {
  const float value = *factor;
  if (value == 1.0F) return;
  const TensorView chunk = find_chunk(table);
  visit_format(chunk.format, [&](auto tag) {
    rescale_chunk(static_cast<decltype(tag)*>(chunk.data), static_cast<int>(chunk.numel), value);
  });
}

/// Calls use(table) for tables that hold all tensors.
template <typename Use>
void for_each_grad_table(const TensorList& tensors, const Use& use) {
  const auto fill = [&](auto add) {
    for (const TensorView& view : tensors) {
      Entry entry{};
      entry.data = view.data;
      entry.grad_format = static_cast<std::uint32_t>(view.format) & 3U;
      if (view.numel > 0) add(entry, view.numel);
    }
  };
  for_each_table<Entry>(kChunk, fill, use);
}

/// Launches finish_kernel, and once more for each further table of counts.
void launch_finish(const UpdateList* counted, double* work, std::int64_t num_chunks, ClipSpec clip,
                   GradStats* stats, cudaStream_t stream) {
  const auto fill = [&](auto add) {
    if (counted == nullptr) return;
    for (const ParameterView& view : counted->parameters)
      if (view.step != nullptr) add(view.step);
  };
  const auto use = [&](const auto& table) {
    launch("finish_kernel", finish_kernel<std::decay_t<decltype(table)>>, 1, kFinalLanes, stream,
           table, work, num_chunks, clip, stats);
    if (work != nullptr) {
      clip = ClipSpec{};
      clip.before = &stats->found_inf;
      work = nullptr;
      num_chunks = 0;
    }
  };
  for_each_table<float*>(kChunk, fill, use, true);
}

void grad_stats(const TensorList& tensors, const ClipSpec& clip, double* work, GradStats* stats,
                const UpdateList* counted, const Launch& where) {
  const DeviceGuard guard(where.device_index);
  const auto stream = static_cast<cudaStream_t>(where.stream);
  std::int64_t chunks = 0;
  for_each_grad_table(tensors, [&](const auto& table) {
    launch("reduce_kernel", reduce_kernel<std::decay_t<decltype(table)>>, table.num_chunks,
           kThreads, stream, table, work + 1 + chunks);
    chunks += table.num_chunks;
  });
  launch_finish(counted, work, chunks, clip, stats, stream);
}

void rescale(const TensorList& tensors, const float* factor, const Launch& where) {
  const DeviceGuard guard(where.device_index);
  for_each_grad_table(tensors, [&](const auto& table) {
    launch("rescale_kernel", rescale_kernel<std::decay_t<decltype(table)>>, table.num_chunks,
           kThreads, static_cast<cudaStream_t>(where.stream), table, factor);
  });
}

template <std::size_t kTable>
void check_grad_kernels() {
  check_kernel("reduce_kernel", reduce_kernel<Table<Entry, kTable>>);
  check_kernel("finish_kernel", finish_kernel<Table<float*, kTable>>);
  check_kernel("rescale_kernel", rescale_kernel<Table<Entry, kTable>>);
}

}  // namespace

void launch_count(const UpdateList& list, const float* found_inf, cudaStream_t stream) {
  ClipSpec clip{};
  clip.before = found_inf;
  if (list.parameters.front().step != nullptr)  // else none has a count
    launch_finish(&list, nullptr, 0, clip, nullptr, stream);
}

void check_device(int device_index) {
  try {
    const DeviceGuard guard(device_index);
    check_grad_kernels<kLongTable>();
    check_grad_kernels<kShortTable>();
    check_update_kernels();
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(error.what()) +
                             "; build fastamp on this machine with FASTAMP_CUDA=ON, or update the "
                             "NVIDIA driver if it is older than the nvcc");
  }
}

const OpTable* cuda_ops() {
  static constexpr OpTable table{grad_stats, rescale, update_on_cuda};
  return &table;
}

}  // namespace fastamp
