// The CPU's passes over the gradients: one read that reduces, one write that rescales.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "step/chunks.h"
#include "step/convert.h"
#include "step/math.h"
#include "step/ops.h"

namespace fastamp {
namespace {

// A small tensor costs a page walk and a cache miss that no hardware prefetcher predicts: the first
// line of a chunk is prefetched this many chunks before it is read. Within a chunk the hardware is
// better alone: prefetching every line costs a tenth of the time.
constexpr std::size_t kPrefetchChunks = 6;

/// Reduces at most kStrip elements of a chunk.
template <typename T>
FASTAMP_INLINE double reduce_strip(const T* data, std::int64_t numel) {
  constexpr int kLanes = static_cast<int>(kRowBytes / static_cast<std::int64_t>(sizeof(T)));
  alignas(64) double lanes[kLanes] = {};
  std::int64_t start = 0;
  for (; start + kLanes <= numel; start += kLanes) {
    const T* row = data + start;
    for (int i = 0; i < kLanes; ++i) lanes[i] += square(to_float(row[i]));
  }
  for (int i = 0; start + i < numel; ++i) lanes[i] += square(to_float(data[start + i]));
  return join_lanes<kLanes>(lanes);
}

FASTAMP_SIMD_CLONES double reduce(const TensorView& chunk) {
  return visit_host_format(chunk.format, [&](auto tag) FASTAMP_INLINE_LAMBDA {
    const auto* elements = static_cast<const decltype(tag)*>(chunk.data);
    double strips[kStripsPerChunk] = {};
    for (std::int64_t s = 0, at = 0; at < chunk.numel; ++s, at += kStrip)
      strips[s] = reduce_strip(elements + at, std::min(kStrip, chunk.numel - at));
    return join_lanes<kStripsPerChunk>(strips);
  });
}

FASTAMP_SIMD_CLONES void rescale(const TensorView& chunk, float factor) {
  visit_host_format(chunk.format, [&](auto tag) FASTAMP_INLINE_LAMBDA {
    auto* elements = static_cast<decltype(tag)*>(chunk.data);
    for (std::int64_t i = 0; i < chunk.numel; ++i)
      from_float(to_float(elements[i]) * factor, &elements[i]);
  });
}

/// Calls body(index, view) for every chunk.
template <typename Fn>
void for_each_chunk(const Chunks& chunks, const TensorList& tensors, int num_threads,
                    const Fn& body) {
  const auto view_of = [&](const Chunk& chunk) {
    const TensorView& tensor = tensors[chunk.tensor];
    char* const data = static_cast<char*>(tensor.data) + chunk.start * size_of(tensor.format);
    return TensorView{data, chunk.numel, tensor.format};
  };
  chunks.for_each_task(num_threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      __builtin_prefetch(view_of(chunks.at_most(i + kPrefetchChunks)).data);
      body(i, view_of(chunks.all[i]));
    }
  });
}

double join_chunks(const double* chunks, std::size_t count) {
  double lanes[kFinalLanes] = {};
  for (std::size_t i = 0; i < count; ++i) lanes[i % kFinalLanes] += chunks[i];
  return join_lanes<kFinalLanes>(lanes);
}

void grad_stats(const TensorList& tensors, const ClipSpec& clip, double* work, GradStats* stats,
                const UpdateList* counted, const Launch& launch) {
  const Chunks chunks(tensors);
  double* partial = work + 1;
  for_each_chunk(chunks, tensors, launch.num_threads,
                 [&](std::size_t i, const TensorView& chunk) { partial[i] = reduce(chunk); });
  work[0] = join_chunks(partial, chunks.all.size());
  *stats = finish(work[0], clip);
  if (counted != nullptr && stats->found_inf == 0) counted->count_step();
}

void rescale_all(const TensorList& tensors, const float* factor, const Launch& launch) {
  if (*factor == 1.0F) return;
  for_each_chunk(Chunks(tensors), tensors, launch.num_threads,
                 [&](std::size_t, const TensorView& chunk) { rescale(chunk, *factor); });
}

}  // namespace

const OpTable& cpu_ops() {
  static constexpr OpTable table{grad_stats, rescale_all, update_on_cpu};
  return table;
}

}  // namespace fastamp
