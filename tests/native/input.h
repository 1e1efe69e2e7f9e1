// What the fuzzers read their cases from, and memory to the byte.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace fuzz {

using Bytes = std::unique_ptr<char[]>;  // of exactly the size: one byte further is an error
using std::int64_t;

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "wrong result: %s\n", what);
  std::abort();
}

inline std::size_t as_size(int64_t value) { return static_cast<std::size_t>(value); }

inline Bytes allocate(int64_t nbytes) {
  return nbytes == 0 ? nullptr : Bytes(new char[as_size(nbytes)]);  // torch has null there, too
}

/// The input, number by number; zeros once it has ended.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : next_(data), end_(data + size) {}

  template <typename T>
  T take() {
    T value{};
    const std::size_t nbytes = std::min(sizeof value, static_cast<std::size_t>(end_ - next_));
    if (nbytes > 0) std::memcpy(&value, next_, nbytes);
    next_ += nbytes;
    return value;
  }

  /// From 0 to `most`, of every order of magnitude.
  int64_t number(int64_t most) {
    const int orders = most == 0 ? 1 : 64 - __builtin_clzll(static_cast<std::uint64_t>(most));
    const int smaller = take<std::uint8_t>() % orders;
    return take<std::uint32_t>() % ((most >> smaller) + 1);
  }

  /// What an argument of 64 bits may be: small, at an edge, or anything.
  int64_t any(int64_t edge) {
    switch (take<std::uint8_t>() % 8) {
      case 0:
        return take<int64_t>();
      case 1:
        return edge + take<std::int8_t>() % 2;
      case 2:
        return -edge + take<std::int8_t>() % 2;
      default:
        return edge == 0 ? 0 : take<std::uint16_t>() % (2 * edge) - edge;
    }
  }

  /// Different bytes from place to place, without using the input up.
  void fill(Bytes& bytes, int64_t nbytes) {
    auto state = take<std::uint32_t>() | 1U;
    for (int64_t i = 0; i < nbytes; ++i) {
      state = state * 1664525U + 1013904223U;
      bytes[as_size(i)] = static_cast<char>(state >> 24);
    }
  }

 private:
  const std::uint8_t* next_;
  const std::uint8_t* end_;
};

/// Each reads one case, and holds what fastamp makes of it to a plain loop.
void fuzz_stack(Input& input);
void fuzz_gather(Input& input);
void fuzz_step(Input& input);
void fuzz_clock(Input& input);

}  // namespace fuzz
