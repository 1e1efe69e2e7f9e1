// The threads of a block as threads, so that a sanitizer finds races between them.
#include <array>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "grid.h"

namespace fastamp::emulate {
namespace {

/// Releases its threads when all that are expected wait.
class Barrier {
 public:
  void expect(unsigned threads) { expected_ = threads; }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const unsigned round = round_;
    ++waiting_;
    release_if_complete();
    released_.wait(lock, [&] { return round_ != round; });
  }

  /// One thread less is waited for.
  void leave() {
    const std::lock_guard<std::mutex> lock(mutex_);
    --expected_;
    release_if_complete();
  }

 private:
  void release_if_complete() {
    if (waiting_ == 0 || waiting_ != expected_) return;
    waiting_ = 0;
    ++round_;
    released_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable released_;
  unsigned expected_ = 0, waiting_ = 0, round_ = 0;
};

/// What the 32 threads of a warp share. Two shuffles alternate: a slow thread reads the earlier.
struct Warp {
  Barrier barrier;
  std::array<std::uint64_t, kWarp> given[2];
};

struct Block {
  Barrier barrier;
  std::array<Warp, kMaxThreads / kWarp> warps;
};

thread_local Block* block = nullptr;
thread_local unsigned shuffles = 0;

Warp& warp() { return block->warps[threadIdx.x / kWarp]; }

}  // namespace

bool run_grid(unsigned blocks, unsigned threads, void (*thread)(const void*), const void* data) {
  static std::mutex one_grid;
  const std::lock_guard<std::mutex> lock(one_grid);
  for (unsigned b = 0; b < blocks; ++b) {
    Block shared;
    shared.barrier.expect(threads);
    for (unsigned first = 0; first < threads; first += kWarp)
      shared.warps[first / kWarp].barrier.expect(threads - first < kWarp ? threads - first : kWarp);
    const auto live = [&](unsigned t) {
      threadIdx = {t, 0, 0};
      blockIdx = {b, 0, 0};
      blockDim = {threads};
      gridDim = {blocks};
      block = &shared;
      thread(data);
      warp().barrier.leave();
      shared.barrier.leave();
    };
    std::vector<std::thread> all;
    for (unsigned t = 0; t < threads; ++t) all.emplace_back(live, t);
    for (std::thread& one : all) one.join();
  }
  return true;
}

void wait_for_block() { block->barrier.wait(); }

std::uint64_t exchange(std::uint64_t bits, unsigned source) {
  std::array<std::uint64_t, kWarp>& given = warp().given[shuffles++ % 2];
  given[threadIdx.x % kWarp] = bits;
  warp().barrier.wait();
  return given[source];
}

}  // namespace fastamp::emulate
