// A list of tensors in chunks, for the CPU's threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "parallel/threads.h"
#include "step/math.h"

namespace fastamp {

/// At most kChunk elements of one tensor of a list.
struct Chunk {
  std::uint32_t tensor;
  std::int64_t start;
  std::int64_t numel;
};

inline std::int64_t room_of(const TensorView& view) { return view.numel; }

/// The chunks of all tensors in list order, grouped into tasks that are worth a thread's while.
struct Chunks {
  std::vector<Chunk> all;
  std::vector<std::size_t> task_starts;  // and one past the last

  template <typename List>
  explicit Chunks(const List& tensors) {
    std::int64_t in_task = kChunk;
    all.reserve(tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::int64_t room = room_of(tensors[i]);
      for (std::int64_t start = 0; start < room; start += kChunk) {
        if (in_task >= kChunk) {
          task_starts.push_back(all.size());
          in_task = 0;
        }
        const std::int64_t numel = std::min(kChunk, room - start);
        all.push_back({static_cast<std::uint32_t>(i), start, numel});
        in_task += numel;
      }
    }
    task_starts.push_back(all.size());
  }

  /// Calls body(begin, end) with the indices of every task's chunks.
  template <typename Fn>
  void for_each_task(int num_threads, const Fn& body) const {
    const auto tasks = static_cast<std::int64_t>(task_starts.size()) - 1;
    parallel_for(tasks, num_threads, [&](std::int64_t task) {
      const auto t = static_cast<std::size_t>(task);
      body(task_starts[t], task_starts[t + 1]);
    });
  }

  /// Returns the chunk with an index or, past the end, the last one.
  const Chunk& at_most(std::size_t index) const { return all[std::min(index, all.size() - 1)]; }
};

}  // namespace fastamp
