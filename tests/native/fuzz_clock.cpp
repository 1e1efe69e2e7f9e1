// Durations and the buckets they are counted in.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "input.h"
#include "timer/clock.h"

namespace fuzz {

void fuzz_clock(Input& input) {
  fastamp::Series series{};
  int64_t count = 0;
  for (int64_t n = input.number(50); n > 0; --n, ++count) {
    const int64_t duration = input.any(fastamp::kLongestNs);
    const std::size_t bucket = fastamp::bucket_of(duration);
    require(bucket < fastamp::kBuckets, "a bucket's number");
    if (duration < std::numeric_limits<int64_t>::max())
      require(fastamp::bucket_of(duration + 1) - bucket <= 1, "the order of buckets");
    series.add(std::max<int64_t>(0, std::min(duration, fastamp::kLongestNs)));
  }
  require(series.count == count, "the number of durations");
}

}  // namespace fuzz
