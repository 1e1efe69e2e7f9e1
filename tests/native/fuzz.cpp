// A fuzzer of the native passes over memory: sizes, shapes, strides, indices and values are read
// from the input, all memory is allocated to the byte, and every result is held to a plain loop.
// With clang's -fsanitize=fuzzer it runs under libFuzzer; with random_inputs.cpp alone.
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace fuzz;
  constexpr void (*kFuzzers[])(Input&) = {fuzz_step,  fuzz_clock,  fuzz_stack,
                                          fuzz_stack, fuzz_gather, fuzz_gather};
  Input input(data, size);
  kFuzzers[input.take<std::uint8_t>() % std::size(kFuzzers)](input);
  return 0;
}
