// The handlers of SIGSEGV and SIGBUS. Outside of a guarded read they call the earlier handlers.
#include "data/fault.h"

#include <atomic>
#include <csetjmp>
#include <csignal>

namespace fastamp {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS};
struct sigaction before[2];

// Where this thread resumes after a fault. Without a read in progress the handler does not access
// it: the first access of a thread allocates, and the thread may have failed anywhere.
thread_local sigjmp_buf* resume = nullptr;
std::atomic<int> num_reads{0};

void on_fault(int signal, siginfo_t* info, void* context) {
  if (num_reads.load() > 0 && resume != nullptr) siglongjmp(*resume, 1);
  const struct sigaction& other = before[signal == kSignals[0] ? 0 : 1];
  if ((other.sa_flags & SA_SIGINFO) != 0) return other.sa_sigaction(signal, info, context);
  if (other.sa_handler != SIG_DFL && other.sa_handler != SIG_IGN) return other.sa_handler(signal);
  sigaction(signal, &other, nullptr);
  raise(signal);  // not blocked, because of SA_NODEFER
}

bool install() {
  struct sigaction ours{};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &ours, &before[i]);
  return true;
}

}  // namespace

bool read_guarded(void (*read)(void* argument), void* argument) {
  static const bool is_installed = install();
  static_cast<void>(is_installed);
  sigjmp_buf here;
  ++num_reads;
  const bool is_whole = sigsetjmp(here, 0) == 0;  // the handler blocks no signal
  if (is_whole) {
    resume = &here;
    read(argument);
  }
  resume = nullptr;
  --num_reads;
  return is_whole;
}

}  // namespace fastamp
