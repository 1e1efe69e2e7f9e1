// See threads.h. torch's OpenMP team does the work where the process has one: it is awake after the
// backward pass, and threads of our own would share the cores with its spinning workers. Everywhere
// else a pool of our own does.
#include "parallel/threads.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace fastamp {
namespace {

/// One call of parallel_for: threads take one index at a time, so that a thread that the machine
/// delays takes fewer.
class Job {
 public:
  Job(std::int64_t count, const std::function<void(std::int64_t)>& body)
      : count_(count), body_(body) {}

  void take_indices() {
    for (;;) {
      const std::int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= count_) return;
      body_(i);
    }
  }

 private:
  std::atomic<std::int64_t> next_{0};
  const std::int64_t count_;
  const std::function<void(std::int64_t)>& body_;
};

/// The entry that compilers call for `#pragma omp parallel`, in libgomp's ABI, which LLVM's and
/// Intel's runtimes offer too.
using OpenMpParallel = void (*)(void (*body)(void*), void* data, unsigned num_threads,
                                unsigned flags);

/// Finds the OpenMP runtime that torch has loaded. A forked child has none of its threads.
OpenMpParallel find_openmp() {
  static const pid_t owner_pid = getpid();
  static const auto found = reinterpret_cast<OpenMpParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return owner_pid == getpid() ? found : nullptr;
}

class ThreadPool {
 public:
  const pid_t owner_pid = getpid();

  void run(Job& job, int num_threads) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (!owner.owns_lock()) return job.take_indices();
    const int helpers = start_helpers(num_threads - 1);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      seats_ = helpers;
      ++job_number_;
    }
    wake_.notify_all();
    job.take_indices();
    std::unique_lock<std::mutex> lock(mutex_);
    seats_ = 0;  // who has not sat down by now would find no work
    done_.wait(lock, [this] { return working_ == 0; });
  }

 private:
  /// Returns how many helpers there are, at most `wanted`; fewer if the system has no more threads.
  int start_helpers(int wanted) {
    while (started_ < wanted) {
      try {
        std::thread([this] { help(); }).detach();
      } catch (const std::system_error&) {
        break;
      }
      ++started_;
    }
    return std::min(started_, wanted);
  }

  void help() {
    std::uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return seats_ > 0 && job_number_ != seen; });
      seen = job_number_;
      Job& job = *job_;
      --seats_;
      ++working_;
      lock.unlock();
      job.take_indices();
      lock.lock();
      if (--working_ == 0) done_.notify_one();
    }
  }

  std::mutex owner_;  // held by the one caller whose job the pool runs
  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::condition_variable done_;
  Job* job_ = nullptr;
  std::uint64_t job_number_ = 0;
  int seats_ = 0;    // helpers that may still join the job
  int working_ = 0;  // helpers inside the job
  int started_ = 0;
};

/// The pool of this process. It is never destroyed: its threads sleep until the process ends, and a
/// forked child, which has none of them, gets a pool of its own.
ThreadPool& pool() {
  static std::atomic<ThreadPool*> current{nullptr};
  ThreadPool* found = current.load(std::memory_order_acquire);
  if (found != nullptr && found->owner_pid == getpid()) return *found;
  auto* fresh = new ThreadPool;
  if (current.compare_exchange_strong(found, fresh)) return *fresh;
  delete fresh;  // another thread was faster
  return *found;
}

}  // namespace

void parallel_for(std::int64_t count, int num_threads,
                  const std::function<void(std::int64_t)>& body) {
  Job job(count, body);
  const auto threads = static_cast<int>(std::min<std::int64_t>(num_threads, count));
  if (threads <= 1) return job.take_indices();
  if (const OpenMpParallel openmp = find_openmp()) {
    const auto work = [](void* data) { static_cast<Job*>(data)->take_indices(); };
    return openmp(work, &job, static_cast<unsigned>(threads), 0);
  }
  pool().run(job, threads);
}

}  // namespace fastamp
