// A fuzzer of the native passes over memory: sizes, shapes, strides, indices and values are read
// from the input, all memory is allocated to the byte, and every result is held to a plain loop.
// With clang's -fsanitize=fuzzer it runs under libFuzzer; with random_inputs.cpp alone.
#include <cstddef>
#include <cstdint>

#include "input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace fuzz;
  Input input(data, size);
  switch (input.take<std::uint8_t>() % 8) {
    case 0:
      fuzz_step(input);
      break;
    case 1:
      fuzz_clock(input);
      fuzz_pairs(input);
      break;
    case 2:
    case 3:
    case 4:
      fuzz_stack(input);
      break;
    case 5:
      fuzz_augment(input);
      break;
    default:
      fuzz_gather(input);
  }
  return 0;
}
