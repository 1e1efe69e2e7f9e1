// The handlers of SIGSEGV and SIGBUS. All but faults in the rows of a guarded copy goes to the
// earlier handlers.
#include "data/fault.h"

#include <algorithm>
#include <atomic>
#include <csetjmp>
#include <csignal>
#include <cstdlib>
#include <mutex>

namespace fastamp {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS};
struct sigaction before[2];

/// The columns that this thread copies, and where it resumes after a fault in them.
struct Reading {
  const std::vector<Column>& columns;
  sigjmp_buf resume;
};

// Without a read in progress the handler does not access it: the first access of a thread
// allocates, and the thread may have failed anywhere.
thread_local Reading* reading = nullptr;
std::atomic<int> num_reads{0};

bool lies_in(const void* address, const char* begin, std::int64_t nbytes) {
  const auto place = reinterpret_cast<std::uintptr_t>(address);
  const auto first = reinterpret_cast<std::uintptr_t>(begin);
  return place >= first && place - first < static_cast<std::uintptr_t>(nbytes);
}

/// Says whether an address lies in the rows of a column, or between them.
bool holds(const Column& column, const void* address) {
  const char* data = column.parts.front().data;
  const std::int64_t last = (column.num_rows - 1) * column.row_stride;
  if (column.parts.size() == 1)
    return lies_in(address, data + std::min<std::int64_t>(last, 0),
                   std::abs(last) + column.row_nbytes);
  return std::any_of(column.parts.begin(), column.parts.end(), [address](const Part& part) {
    return lies_in(address, part.data, part.end - part.begin);
  });
}

void on_fault(int signal, siginfo_t* info, void* context) {
  if (num_reads.load() > 0 && reading != nullptr) {
    for (const Column& column : reading->columns)
      if (holds(column, info->si_addr)) siglongjmp(reading->resume, 1);
  }
  const struct sigaction& other = before[signal == kSignals[0] ? 0 : 1];
  if ((other.sa_flags & SA_SIGINFO) != 0) return other.sa_sigaction(signal, info, context);
  if (other.sa_handler != SIG_DFL && other.sa_handler != SIG_IGN) return other.sa_handler(signal);
  sigaction(signal, &other, nullptr);
  raise(signal);  // not blocked, because of SA_NODEFER
}

}  // namespace

void keep_guard() {
  static std::mutex mutex;  // of what follows, and `before`
  static bool is_installed[2];
  struct sigaction ours{};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 2; ++i) {
    struct sigaction now;
    sigaction(kSignals[i], nullptr, &now);
    if (now.sa_sigaction == on_fault) continue;
    const std::lock_guard<std::mutex> lock(mutex);
    sigaction(kSignals[i], nullptr, &now);  // another thread may have been faster
    // A handler that was set after ours calls ours. None, or again the one before ours, means that
    // ours was removed: faulthandler.disable() restores what enable() found.
    const auto handler = now.sa_handler;
    if (!is_installed[i] || handler == SIG_DFL || handler == before[i].sa_handler)
      sigaction(kSignals[i], &ours, &before[i]);
    is_installed[i] = true;
  }
}

GatherResult gather_guarded(const std::vector<Column>& columns, const GatherJob& job) {
  Reading here{columns, {}};
  ++num_reads;
  const bool is_whole = sigsetjmp(here.resume, 0) == 0;  // the handler blocks no signal
  GatherResult result{0, -1, 0, true};
  if (is_whole) {
    reading = &here;
    result = gather(columns, job);
  }
  reading = nullptr;
  --num_reads;
  return result;
}

}  // namespace fastamp
