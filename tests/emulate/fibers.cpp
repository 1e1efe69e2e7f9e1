// The threads of a block as fibers of one thread: they switch at barriers and shuffles, so that a
// grid runs the same way each time. Every other block begins with its last thread.
#undef _FORTIFY_SOURCE  // its longjmp takes a jump to another stack for an error
#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <mutex>
#include <vector>

#include "grid.h"

namespace fastamp::emulate {

namespace {

constexpr std::size_t kStack = 64 * 1024;

/// A set of threads that wait for each other.
struct Barrier {
  unsigned expected = 0;
  std::vector<unsigned> waiting;
};

struct Fiber {
  jmp_buf at;
  std::unique_ptr<char[]> stack;
  unsigned shuffles = 0;
};

/// The block that runs. Fibers stay for the next one, each in an endless loop over blocks.
struct Block {
  std::mutex one_grid;
  std::vector<Fiber> fibers;
  jmp_buf caller;
  unsigned current = 0;
  std::vector<unsigned> ready;  // as a ring: no fiber is in it twice
  unsigned first = 0, count = 0;
  Barrier block, warps[kMaxThreads / kWarp];
  std::uint64_t given[2][kMaxThreads];  // two shuffles alternate: a slow thread reads the earlier
  void (*thread)(const void*) = nullptr;
  const void* data = nullptr;
  unsigned running = 0;
};
Block now;

void make_ready(unsigned fiber) { now.ready[(now.first + now.count++) % kMaxThreads] = fiber; }

/// Resumes the next fiber that is ready, or else the caller.
[[noreturn]] void run_next() {
  if (now.count == 0) _longjmp(now.caller, 1);
  now.current = now.ready[now.first];
  now.first = (now.first + 1) % kMaxThreads;
  --now.count;
  threadIdx = {now.current, 0, 0};
  _longjmp(now.fibers[now.current].at, 1);
}

void release(Barrier& barrier) {
  for (const unsigned fiber : barrier.waiting) make_ready(fiber);
  barrier.waiting.clear();
}

void wait(Barrier& barrier) {
  if (barrier.waiting.size() + 1 == barrier.expected) return release(barrier);
  barrier.waiting.push_back(now.current);
  if (_setjmp(now.fibers[now.current].at) == 0) run_next();
}

/// One thread less is waited for.
void leave(Barrier& barrier) {
  --barrier.expected;
  if (!barrier.waiting.empty() && barrier.waiting.size() == barrier.expected) release(barrier);
}

void live() {
  for (;;) {
    if (_setjmp(now.fibers[now.current].at) == 0) run_next();
    now.thread(now.data);
    leave(now.warps[now.current / kWarp]);
    leave(now.block);
    --now.running;
  }
}

/// Makes the fibers, each of which runs until it can be resumed.
void start_fibers() {
  now.ready.resize(kMaxThreads);
  now.fibers = std::vector<Fiber>(kMaxThreads);
  now.count = 0;
  for (now.current = 0; now.current < kMaxThreads; ++now.current) {
    Fiber& fiber = now.fibers[now.current];
    fiber.stack = std::unique_ptr<char[]>(new char[kStack]);
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack.get();
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, live, 0);
    if (_setjmp(now.caller) == 0) setcontext(&context);
  }
}

bool run_block(unsigned threads, bool backwards) {
  now.running = now.block.expected = threads;
  for (unsigned i = 0; i < threads; ++i) {
    const unsigned left = threads - i / kWarp * kWarp;
    now.warps[i / kWarp].expected = left < kWarp ? left : kWarp;
    make_ready(backwards ? threads - 1 - i : i);
  }
  if (_setjmp(now.caller) == 0) run_next();
  return now.running == 0;
}

}  // namespace

bool run_grid(unsigned blocks, unsigned threads, void (*thread)(const void*), const void* data) {
  const std::lock_guard<std::mutex> lock(now.one_grid);
  if (now.fibers.empty()) start_fibers();
  now.thread = thread;
  now.data = data;
  blockDim = {threads};
  gridDim = {blocks};
  for (unsigned block = 0; block < blocks; ++block) {
    blockIdx = {block, 0, 0};
    if (run_block(threads, block % 2 != 0)) continue;
    now.fibers.clear();  // they are stuck at their barriers
    now.block.waiting.clear();
    for (Barrier& warp : now.warps) warp.waiting.clear();
    return false;
  }
  return true;
}

void wait_for_block() { wait(now.block); }

std::uint64_t exchange(std::uint64_t bits, unsigned source) {
  std::uint64_t* given = now.given[now.fibers[now.current].shuffles++ % 2];
  given[now.current] = bits;
  wait(now.warps[now.current / kWarp]);
  return given[now.current / kWarp * kWarp + source];
}

}  // namespace fastamp::emulate
