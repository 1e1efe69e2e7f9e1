// The statistics of one region's durations, on the host's monotonic clock.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace fastamp {

inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Durations go into a log-linear histogram: exact below 64 ns, then 32 buckets for every doubling,
// so that no bucket is wider than 1/32 (3.125 %) of its durations. fastamp/timer/timer.py turns
// buckets into durations again; fastamp/timer/regions.py makes the same histogram.
constexpr int kSubBits = 5;
constexpr std::size_t kBuckets = std::size_t{44} << kSubBits;
constexpr std::int64_t kLongestNs = (std::int64_t{1} << 48) - 1;  // 3.3 days

/// The bucket of a duration; the last one takes all longer ones.
inline std::size_t bucket_of(std::int64_t duration_ns) {
  if (duration_ns <= 0) return 0;
  const auto ns = static_cast<std::uint64_t>(duration_ns < kLongestNs ? duration_ns : kLongestNs);
  const int length = 64 - __builtin_clzll(ns);
  const int shift = length > kSubBits + 1 ? length - (kSubBits + 1) : 0;
  return (static_cast<std::size_t>(shift) << kSubBits) + static_cast<std::size_t>(ns >> shift);
}

/// Exact count, sum, minimum and maximum, and the histogram. All zero is empty.
struct Series {
  std::int64_t count;
  std::int64_t sum_ns;
  std::int64_t min_ns;
  std::int64_t max_ns;
  std::array<std::int64_t, kBuckets> histogram;

  void add(std::int64_t duration_ns) {
    ++histogram[bucket_of(duration_ns)];
    if (count == 0 || duration_ns < min_ns) min_ns = duration_ns;
    if (count == 0 || duration_ns > max_ns) max_ns = duration_ns;
    sum_ns += duration_ns;
    ++count;
  }
};

}  // namespace fastamp
