// The copies of rows. Batches of this size evict each other from the caches before they are read:
// they are written past these, which saves reading the memory that is overwritten.
#include "data/gather.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "parallel/threads.h"
#include "support/macros.h"

namespace fastamp {
namespace {

// Bytes that a thread copies at a time.
constexpr std::int64_t kTaskBytes = 256 * 1024;
constexpr std::int64_t kLine = 64;
// Rows lie anywhere, so that the processor cannot predict the next ones: so many bytes ahead are
// prefetched into the second-level cache. In a long row the processor's prefetcher soon takes over.
constexpr std::int64_t kPrefetchBytes = 4096;
typedef long long Block __attribute__((vector_size(16), may_alias));

void prefetch(const char* row, std::int64_t nbytes) {
  for (std::int64_t i = 0; i < std::min(nbytes, kPrefetchBytes); i += kLine)
    __builtin_prefetch(row + i, 0, 2);
}

void stream(const char* source, std::int64_t nbytes, char* output) {
  constexpr std::int64_t kBlock = sizeof(Block);
  std::int64_t i = -reinterpret_cast<std::intptr_t>(output) & (kBlock - 1);
  i = std::min(i, nbytes);
  std::memcpy(output, source, static_cast<std::size_t>(i));
  for (; i + kLine <= nbytes; i += kLine) {
    Block line[kLine / kBlock];
    std::memcpy(line, source + i, kLine);
    auto* to = reinterpret_cast<Block*>(output + i);
    for (const Block block : line) FASTAMP_STREAM(to++, block);
  }
  std::memcpy(output + i, source + i, static_cast<std::size_t>(nbytes - i));
}

template <typename T>
FASTAMP_INLINE void widen(const char* source, std::int64_t nbytes, char* output) {
  constexpr std::int64_t kSize = sizeof(T);
  for (std::int64_t i = 0; i < nbytes / kSize; ++i) {
    T token;  // at any address: a file's tokens may begin at an odd one
    std::memcpy(&token, source + i * kSize, sizeof(T));
    reinterpret_cast<std::int64_t*>(output)[i] = token;
  }
}

FASTAMP_SIMD_CLONES void widen_row(int widened, const char* source, std::int64_t nbytes,
                                   char* output) {
  switch (widened) {
    case 1:
      return widen<std::uint8_t>(source, nbytes, output);
    case 2:
      return widen<std::uint16_t>(source, nbytes, output);
    case 4:
      return widen<std::uint32_t>(source, nbytes, output);
    default:
      return widen<std::int32_t>(source, nbytes, output);
  }
}

}  // namespace

std::int64_t gather(const Column& column, const std::int64_t* rows, std::int64_t count,
                    char* output, int num_threads) {
  for (std::int64_t i = 0; i < count; ++i)
    if (rows[i] < 0 || rows[i] >= column.num_rows) return i;
  const std::int64_t nbytes = column.row_nbytes;
  if (nbytes == 0) return -1;  // an empty output has no address
  const std::int64_t to_nbytes =
      column.widened == 0 ? nbytes : nbytes / std::abs(column.widened) * 8;
  const std::int64_t per_task =
      std::max<std::int64_t>(1, kTaskBytes / std::max<std::int64_t>(1, nbytes));
  const std::int64_t ahead = std::max<std::int64_t>(1, kPrefetchBytes / nbytes);
  const auto copy = [&](std::int64_t task) {
    const std::int64_t begin = task * per_task, end = std::min(count, begin + per_task);
    for (std::int64_t i = begin - ahead; i < end; ++i) {
      if (i + ahead < count) prefetch(column.data + rows[i + ahead] * column.row_stride, nbytes);
      if (i < begin) continue;
      const char* row = column.data + rows[i] * column.row_stride;
      if (column.widened == 0)
        stream(row, nbytes, output + i * to_nbytes);
      else
        widen_row(column.widened, row, nbytes, output + i * to_nbytes);
    }
    FASTAMP_STREAM_END();
  };
  parallel_for((count + per_task - 1) / per_task, num_threads, copy);
  return -1;
}

}  // namespace fastamp
