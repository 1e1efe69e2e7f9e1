// Runs a fuzzer of libFuzzer's interface without libFuzzer: on random inputs, each of which follows
// from its number. Usage: PROGRAM COUNT [FIRST] [SECONDS]; ends after either, and says where it was
// if an input ends the process or takes more than a second of the processor.
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace {

constexpr itimerval kLimit{{0, 0}, {1, 0}};
unsigned long long number = 0;

void say_where() { std::fprintf(stderr, "at input %llu\n", number); }

void stop(int signal) {
  std::fprintf(stderr, "%s\n", signal == SIGVTALRM ? "more than a second" : "aborted");
  say_where();
  _exit(1);
}

std::vector<std::uint8_t> make_input(unsigned long long seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint8_t> bytes(random() % 400);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random() >> 17);
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int place, const char* otherwise) {
    return std::strtoull(argc > place ? argv[place] : otherwise, nullptr, 10);
  };
  const auto first = argument(2, "0");
  const auto last = first + argument(1, "100000");
  const double limit_s = static_cast<double>(argument(3, "1000000"));
  signal(SIGVTALRM, stop);
  signal(SIGABRT, stop);
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(say_where);
  const auto start = std::chrono::steady_clock::now();
  double elapsed_s = 0;
  for (number = first; number < last && elapsed_s < limit_s; ++number) {
    const std::vector<std::uint8_t> bytes = make_input(number);
    setitimer(ITIMER_VIRTUAL, &kLimit, nullptr);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    elapsed_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  const auto count = static_cast<double>(number - first);
  std::printf("native: %.0f inputs, %.0f a second\n", count, count / elapsed_s);
}
