// The queues of batches, and the threads of the process that work for all of them. A thread takes a
// whole batch: there are many of them.
#include "data/queue.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "data/fault.h"
#include "support/macros.h"

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

}  // namespace

/// The threads, which never end, and the line in which queues wait for them.
struct GatherQueue::Pool {
  static Pool& of_process();

  void run();

  /// Has a thread look at the line: a new one if none is idle and there are fewer than `most`.
  void call_thread(std::unique_lock<std::mutex> lock, int most);

  const pid_t owner_pid = getpid();
  std::mutex mutex;  // guards what follows, and the jobs of all queues; not held during copies
  std::condition_variable wake;
  std::deque<Shared*> line;  // the queues that have jobs to start, each once
  int num_threads = 0;
  int num_idle = 0;
};

/// What the consumer and the threads share.
struct GatherQueue::Shared {
  Shared(std::vector<Column> columns_, int depth, int num_threads_)
      : columns(std::move(columns_)),
        num_threads(num_threads_),
        slots(static_cast<std::size_t>(depth)) {}

  Slot& slot_of(std::size_t number) { return slots[number % slots.size()]; }

  void leave_line() {
    auto& line = pool.line;
    line.erase(std::remove(line.begin(), line.end(), this), line.end());
  }

  /// Does the next job; the queue's turn for another comes after all others'.
  void run_next(std::unique_lock<std::mutex>& lock) {
    Slot& slot = slot_of(started++);
    leave_line();
    if (started < submitted) pool.line.push_back(this);
    ++num_running;
    lock.unlock();
    const Clock::time_point start = Clock::now();
    GatherResult result = gather_guarded(columns, slot.job);
    result.elapsed_s = std::chrono::duration<double>(Clock::now() - start).count();
    lock.lock();
    slot.result = result;
    slot.done = true;
    --num_running;
    is_done.notify_one();  // the one consumer, or the queue's end
  }

  Pool& pool = Pool::of_process();
  const std::vector<Column> columns;
  const int num_threads;
  std::condition_variable is_done;
  std::vector<Slot> slots;  // this and what follows is guarded by the pool's mutex
  // Jobs are numbered; delivered <= started <= submitted <= delivered + depth. The queue is in line
  // while started < submitted; its end waits until num_running, of those that started, is 0.
  std::size_t submitted = 0;
  std::size_t started = 0;
  std::size_t delivered = 0;
  int num_running = 0;
};

GatherQueue::Pool& GatherQueue::Pool::of_process() {
  // Never destroyed, since its threads run until the process ends. A forked child has none of them,
  // and locks stay locked: it has a pool of its own.
  static std::atomic<Pool*> current{nullptr};
  Pool* pool = current.load();
  while (pool == nullptr || pool->owner_pid != getpid()) {
    auto made = std::make_unique<Pool>();
    if (current.compare_exchange_strong(pool, made.get())) pool = made.release();
  }
  return *pool;
}

void GatherQueue::Pool::run() {
  FASTAMP_NAME_THREAD("fastamp gather");
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    ++num_idle;
    wake.wait(lock, [this] { return !line.empty(); });
    --num_idle;
    line.front()->run_next(lock);
  }
}

void GatherQueue::Pool::call_thread(std::unique_lock<std::mutex> lock, int most) {
  if (num_idle > 0 || num_threads >= most) {
    lock.unlock();
    wake.notify_one();
    return;
  }
  ++num_threads;
  lock.unlock();
  try {
    std::thread([this] { run(); }).detach();
  } catch (const std::system_error&) {
    // The system has no more threads: the consumer copies in their place.
    lock.lock();
    --num_threads;
  }
}

GatherQueue::GatherQueue(std::vector<Column> columns, int depth, int num_threads)
    : shared_(std::make_unique<Shared>(std::move(columns), depth, num_threads)) {}

GatherQueue::~GatherQueue() {
  Pool& pool = shared_->pool;
  if (pool.owner_pid != getpid()) {
    // A forked child has none of the threads to wait for, and locks stay locked.
    static_cast<void>(shared_.release());
    return;
  }
  std::unique_lock<std::mutex> lock(pool.mutex);
  shared_->leave_line();
  shared_->is_done.wait(lock, [this] { return shared_->num_running == 0; });
}

GatherQueue::Shared& GatherQueue::shared() {
  if (shared_->pool.owner_pid != getpid())
    throw std::runtime_error(
        "this iterator was made before the process forked and its threads stayed behind: "
        "call iter(loader) in the child");
  return *shared_;
}

void GatherQueue::submit(GatherJob job) {
  Shared& shared = this->shared();
  if (job.outputs.size() != shared.columns.size())
    throw std::invalid_argument("gather queue: expected one output for each column");
  for (const Column& column : shared.columns) {
    if (column.images.num_steps > 0 && job.keys == nullptr)
      throw std::invalid_argument("gather queue: images are augmented, and there are no keys");
  }
  const bool is_small = nbytes_of(shared.columns, job) < kWakeBytes;
  keep_guard();
  std::unique_lock<std::mutex> lock(shared.pool.mutex);
  if (shared.submitted - shared.delivered == shared.slots.size())
    throw std::runtime_error("gather queue: more jobs under way than its depth");
  if (shared.started == shared.submitted) shared.pool.line.push_back(&shared);
  Slot& slot = shared.slot_of(shared.submitted++);
  slot.job = std::move(job);
  slot.done = false;
  if (!is_small) shared.pool.call_thread(std::move(lock), shared.num_threads);
}

bool GatherQueue::is_ready() {
  Shared& shared = this->shared();
  const std::lock_guard<std::mutex> lock(shared.pool.mutex);
  if (shared.delivered == shared.submitted) return false;
  const Slot& slot = shared.slot_of(shared.delivered);
  return slot.done || nbytes_of(shared.columns, slot.job) < kWakeBytes;
}

std::optional<GatherResult> GatherQueue::wait(double timeout_s) {
  Shared& shared = this->shared();
  std::unique_lock<std::mutex> lock(shared.pool.mutex);
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
