// The queue of batches. A thread takes a whole batch: there are many of them.
#include "data/queue.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "data/fault.h"

namespace fastamp {
namespace {

// Smaller batches take less time than waking a thread: the consumer copies them.
constexpr std::int64_t kWakeBytes = 64 << 10;

using Clock = std::chrono::steady_clock;

struct Slot {
  GatherJob job{};
  GatherResult result{};
  bool done = false;
};

/// A job on its way through a guarded read.
struct Reading {
  const std::vector<Column>& columns;
  const GatherJob& job;
  GatherResult result;
};

void read(void* reading) {
  auto& [columns, job, result] = *static_cast<Reading*>(reading);
  result = gather(columns, job);
}

}  // namespace

/// What the consumer and the threads share.
struct GatherQueue::Shared {
  Shared(std::vector<Column> columns_, int depth)
      : columns(std::move(columns_)), slots(static_cast<std::size_t>(depth)) {}

  Slot& slot_of(std::size_t number) { return slots[number % slots.size()]; }

  void run_next(std::unique_lock<std::mutex>& lock) {
    Slot& slot = slot_of(started++);
    lock.unlock();
    const Clock::time_point start = Clock::now();
    Reading reading{columns, slot.job, {}};
    const bool is_lost = !read_guarded(read, &reading);
    GatherResult result = reading.result;
    result.is_lost = is_lost;
    result.elapsed_s = std::chrono::duration<double>(Clock::now() - start).count();
    lock.lock();
    slot.result = result;
    slot.done = true;
    is_done.notify_one();  // the one consumer
  }

  void run_until_stopped() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      wake.wait(lock, [this] { return is_stopping || started < submitted; });
      if (is_stopping) return;
      run_next(lock);
    }
  }

  const pid_t owner_pid = getpid();
  const std::vector<Column> columns;
  std::vector<std::thread> threads;  // the consumer's
  std::mutex mutex;                  // guards what follows
  std::condition_variable wake;
  std::condition_variable is_done;
  std::vector<Slot> slots;
  // Jobs are numbered; delivered <= started <= submitted <= delivered + depth.
  std::size_t submitted = 0;
  std::size_t started = 0;
  std::size_t delivered = 0;
  bool is_stopping = false;
};

GatherQueue::GatherQueue(std::vector<Column> columns, int depth, int num_threads)
    : shared_(std::make_unique<Shared>(std::move(columns), depth)) {
  try {
    for (int i = 0; i < num_threads; ++i)
      shared_->threads.emplace_back([shared = shared_.get()] { shared->run_until_stopped(); });
  } catch (const std::system_error&) {
    // The system has no more threads: the consumer copies in their place.
  }
}

GatherQueue::~GatherQueue() {
  if (shared_->owner_pid != getpid()) {
    // A forked child has none of the threads to join, and locks stay locked.
    static_cast<void>(shared_.release());
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->is_stopping = true;
  }
  shared_->wake.notify_all();
  for (std::thread& thread : shared_->threads) thread.join();
}

GatherQueue::Shared& GatherQueue::shared() {
  if (shared_->owner_pid != getpid())
    throw std::runtime_error(
        "this iterator was made before the process forked and its threads stayed behind: "
        "call iter(loader) in the child");
  return *shared_;
}

void GatherQueue::submit(GatherJob job) {
  Shared& shared = this->shared();
  for (const Column& column : shared.columns) {
    if (column.images.num_steps > 0 && job.keys == nullptr)
      throw std::invalid_argument("gather queue: images are augmented, and there are no keys");
  }
  const bool is_small = nbytes_of(shared.columns, job) < kWakeBytes;
  {
    const std::lock_guard<std::mutex> lock(shared.mutex);
    if (shared.submitted - shared.delivered == shared.slots.size())
      throw std::runtime_error("gather queue: more jobs under way than its depth");
    Slot& slot = shared.slot_of(shared.submitted++);
    slot.job = std::move(job);
    slot.done = false;
  }
  if (!is_small) shared.wake.notify_one();
}

bool GatherQueue::is_ready() {
  Shared& shared = this->shared();
  const std::lock_guard<std::mutex> lock(shared.mutex);
  if (shared.delivered == shared.submitted) return false;
  const Slot& slot = shared.slot_of(shared.delivered);
  return slot.done || nbytes_of(shared.columns, slot.job) < kWakeBytes;
}

std::optional<GatherResult> GatherQueue::wait(double timeout_s) {
  Shared& shared = this->shared();
  std::unique_lock<std::mutex> lock(shared.mutex);
  if (shared.delivered == shared.submitted)
    throw std::runtime_error("gather queue: no job to wait for");
  const Slot& slot = shared.slot_of(shared.delivered);
  // Helping costs less than sleeping until another thread is done.
  while (!slot.done && shared.started < shared.submitted) shared.run_next(lock);
  const auto timeout = std::chrono::duration<double>(timeout_s);
  if (!shared.is_done.wait_for(lock, timeout, [&] { return slot.done; })) return std::nullopt;
  ++shared.delivered;
  return slot.result;
}

}  // namespace fastamp
