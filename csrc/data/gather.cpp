// See data/gather.h. A thread takes a whole batch: batches are many, and nobody waits for a team.
#include "data/gather.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "support/macros.h"

namespace fastamp {
namespace {

// Rows lie anywhere, so that the processor does not foresee the next one: it is fetched into the
// second-level cache while this one is copied. In a long row the processor's own prefetcher soon
// takes over.
constexpr std::int64_t kRowsAhead = 2;
constexpr std::int64_t kPrefetchBytes = 4096;
constexpr std::int64_t kLine = 64;

// Batches from this size on push each other out of the caches before anybody reads them. Their long
// rows are written past the caches, which spares the memory a read of what is overwritten.
constexpr std::int64_t kStreamBytes = 4 << 20;
typedef long long Block __attribute__((vector_size(16), may_alias));

// What is copied in the time that it takes to wake a thread is left to the consumer.
constexpr std::int64_t kWakeBytes = 8 << 10;

void prefetch(const char* line) { __builtin_prefetch(line, 0, 2); }

FASTAMP_SIMD_CLONES void copy(const char* source, std::int64_t nbytes, const char* ahead,
                              char* output) {
  std::int64_t i = 0;
  for (; i + kLine <= std::min(nbytes, kPrefetchBytes); i += kLine) {
    prefetch(ahead + i);
    std::memcpy(output + i, source + i, kLine);
  }
  std::memcpy(output + i, source + i, static_cast<std::size_t>(nbytes - i));
}

void stream(const char* source, std::int64_t nbytes, char* output) {
  constexpr std::int64_t kBlock = sizeof(Block);
  std::int64_t i = -reinterpret_cast<std::intptr_t>(output) & (kBlock - 1);
  std::memcpy(output, source, static_cast<std::size_t>(i));
  for (; i + kLine <= nbytes; i += kLine) {
    Block line[kLine / kBlock];
    std::memcpy(line, source + i, kLine);
    auto* to = reinterpret_cast<Block*>(output + i);
    for (const Block block : line) FASTAMP_STREAM(to++, block);
  }
  std::memcpy(output + i, source + i, static_cast<std::size_t>(nbytes - i));
}

template <typename T>
FASTAMP_INLINE void widen(const char* source, std::int64_t nbytes, const char* ahead,
                          char* output) {
  for (std::int64_t i = 0; i < std::min(nbytes, kPrefetchBytes); i += kLine) prefetch(ahead + i);
  auto* to = reinterpret_cast<std::int64_t*>(output);
  const std::int64_t numel = nbytes / static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t i = 0; i < numel; ++i) {
    T token;  // at any address: a file's tokens may begin at an odd one
    std::memcpy(&token, source + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    to[i] = token;
  }
}

FASTAMP_SIMD_CLONES void widen_uint8(const char* source, std::int64_t nbytes, const char* ahead,
                                     char* output) {
  widen<std::uint8_t>(source, nbytes, ahead, output);
}

FASTAMP_SIMD_CLONES void widen_uint16(const char* source, std::int64_t nbytes, const char* ahead,
                                      char* output) {
  widen<std::uint16_t>(source, nbytes, ahead, output);
}

FASTAMP_SIMD_CLONES void widen_int32(const char* source, std::int64_t nbytes, const char* ahead,
                                     char* output) {
  widen<std::int32_t>(source, nbytes, ahead, output);
}

std::int64_t output_nbytes(const Column& column) {
  switch (column.cast) {
    case Cast::kUInt8ToInt64:
      return column.row_nbytes * 8;
    case Cast::kUInt16ToInt64:
      return column.row_nbytes * 4;
    case Cast::kInt32ToInt64:
      return column.row_nbytes * 2;
    case Cast::kNone:
      break;
  }
  return column.row_nbytes;
}

void copy_row(const Column& column, const char* source, const char* ahead, char* output) {
  switch (column.cast) {
    case Cast::kUInt8ToInt64:
      return widen_uint8(source, column.row_nbytes, ahead, output);
    case Cast::kUInt16ToInt64:
      return widen_uint16(source, column.row_nbytes, ahead, output);
    case Cast::kInt32ToInt64:
      return widen_int32(source, column.row_nbytes, ahead, output);
    case Cast::kNone:
      return copy(source, column.row_nbytes, ahead, output);
  }
}

/// Returns the row that an index means, counted from the end where it is negative; -1 if none.
std::int64_t row_of(const Column& column, std::int64_t index) {
  const std::int64_t row = index < 0 ? index + column.num_rows : index;
  return row < column.num_rows ? std::max<std::int64_t>(row, -1) : -1;
}

std::int64_t nbytes_of(const std::vector<Column>& columns, const GatherJob& job) {
  std::int64_t row_nbytes = 0;
  for (const Column& column : columns) row_nbytes += output_nbytes(column);
  return job.count * row_nbytes;
}

GatherResult gather(const std::vector<Column>& columns, const GatherJob& job) {
  const bool is_large = nbytes_of(columns, job) >= kStreamBytes;
  for (std::size_t c = 0; c < columns.size(); ++c) {
    const Column& column = columns[c];
    const std::int64_t out_nbytes = output_nbytes(column);
    const bool streams = is_large && column.cast == Cast::kNone && out_nbytes >= kPrefetchBytes;
    for (std::int64_t i = 0; i < job.count; ++i) {
      const std::int64_t row = row_of(column, job.indices[i]);
      if (row < 0) return {0, i, static_cast<std::int64_t>(c)};
      if (out_nbytes == 0) continue;
      const char* source = column.data + row * column.row_stride;
      char* output = job.outputs[c] + i * out_nbytes;
      if (streams) {
        stream(source, out_nbytes, output);
        continue;
      }
      const std::int64_t next =
          row_of(column, job.indices[std::min(i + kRowsAhead, job.count - 1)]);
      copy_row(column, source, column.data + std::max<std::int64_t>(next, 0) * column.row_stride,
               output);
    }
  }
  if (is_large) FASTAMP_STREAM_END();
  return {0, -1, -1};
}

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// The jobs, and what consumer and threads share.
class Jobs {
 public:
  std::vector<std::thread> threads;  // the consumer's

  Jobs(std::vector<Column> columns, int depth)
      : columns_(std::move(columns)), slots_(static_cast<std::size_t>(depth)) {}

  void submit(GatherJob job) {
    const bool is_small = nbytes_of(columns_, job) < kWakeBytes;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (submitted_ - delivered_ == slots_.size())
        throw std::runtime_error("gather queue: more jobs under way than its depth");
      Slot& slot = slot_of(submitted_);
      slot.job = std::move(job);
      slot.done = false;
      ++submitted_;
    }
    if (!is_small) wake_.notify_one();
  }

  std::optional<GatherResult> wait(double timeout_s) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (delivered_ == submitted_) throw std::runtime_error("gather queue: no job to wait for");
    const Slot& slot = slot_of(delivered_);
    // To help costs less than to sleep until somebody else has done it.
    while (!slot.done && started_ < submitted_) run_next(lock);
    const auto timeout = std::chrono::duration<double>(timeout_s);
    if (!done_.wait_for(lock, timeout, [&] { return slot.done; })) return std::nullopt;
    ++delivered_;
    return slot.result;
  }

  /// What a thread does until `stop`.
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stopping_ || started_ < submitted_; });
      if (stopping_) return;
      run_next(lock);
    }
  }

  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
  }

 private:
  struct Slot {
    GatherJob job{};
    GatherResult result{};
    bool done = false;
  };

  Slot& slot_of(std::size_t number) { return slots_[number % slots_.size()]; }

  void run_next(std::unique_lock<std::mutex>& lock) {
    Slot& slot = slot_of(started_++);
    lock.unlock();
    const Clock::time_point start = Clock::now();
    GatherResult result = gather(columns_, slot.job);
    result.elapsed_s = seconds_since(start);
    lock.lock();
    slot.result = result;
    slot.done = true;
    done_.notify_one();  // the one consumer
  }

  const std::vector<Column> columns_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::condition_variable done_;
  std::vector<Slot> slots_;
  // Jobs are numbered; delivered_ <= started_ <= submitted_ <= delivered_ + depth.
  std::size_t submitted_ = 0;
  std::size_t started_ = 0;
  std::size_t delivered_ = 0;
  bool stopping_ = false;
};

class Queue final : public GatherQueue {
 public:
  Queue(std::vector<Column> columns, int depth, int num_threads)
      : jobs_(std::make_unique<Jobs>(std::move(columns), depth)) {
    try {
      for (int i = 0; i < num_threads; ++i)
        jobs_->threads.emplace_back([jobs = jobs_.get()] { jobs->work(); });
    } catch (const std::system_error&) {
      // The system has no more threads: the consumer does what they would have done.
    }
  }

  ~Queue() override {
    if (owner_pid_ != getpid()) {
      // A forked child has none of the threads: nobody to wait for, and locks that nobody opens.
      static_cast<void>(jobs_.release());
      return;
    }
    jobs_->stop();
    for (std::thread& thread : jobs_->threads) thread.join();
  }

  void submit(GatherJob job) override {
    check_process();
    jobs_->submit(std::move(job));
  }

  std::optional<GatherResult> wait(double timeout_s) override {
    check_process();
    return jobs_->wait(timeout_s);
  }

 private:
  void check_process() const {
    if (owner_pid_ != getpid())
      throw std::runtime_error(
          "this iterator was made before the process forked and its threads stayed behind: "
          "call iter(loader) in the child");
  }

  const pid_t owner_pid_ = getpid();
  std::unique_ptr<Jobs> jobs_;
};

}  // namespace

std::unique_ptr<GatherQueue> make_gather_queue(std::vector<Column> columns, int depth,
                                               int num_threads) {
  return std::make_unique<Queue>(std::move(columns), depth, num_threads);
}

}  // namespace fastamp
