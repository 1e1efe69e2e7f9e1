// Rows gathered out of a column at any address and with any stride.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "data/gather.h"
#include "input.h"

namespace fuzz {

void fuzz_gather(Input& input) {
  const int64_t row_nbytes = input.number(20000);
  const int64_t num_rows = input.number(60);
  const int64_t offset = input.number(17);
  const int64_t stride = input.take<std::uint8_t>() % 2 == 0 ? row_nbytes : input.number(20000);
  const int64_t span = num_rows == 0 ? 0 : (num_rows - 1) * stride + row_nbytes;
  Bytes memory = allocate(offset + span);
  input.fill(memory, offset + span);
  const char* data = memory == nullptr ? nullptr : memory.get() + offset;
  const fastamp::Column column{data, num_rows, stride, row_nbytes};
  std::vector<int64_t> rows;
  const bool is_wild = input.take<std::uint8_t>() % 4 == 0;
  for (int64_t n = input.number(80); n > 0; --n)
    rows.push_back(is_wild ? input.any(num_rows)
                           : input.number(std::max<int64_t>(num_rows - 1, 0)));
  rows.shrink_to_fit();
  const auto count = static_cast<int64_t>(rows.size());
  const Bytes out = allocate(count * row_nbytes);
  const int threads = 1 + input.take<std::uint8_t>() % 3;
  const int64_t bad = fastamp::gather(column, rows.data(), count, out.get(), threads);
  const auto found = std::find_if(rows.begin(), rows.end(),
                                  [&](int64_t row) { return row < 0 || row >= num_rows; });
  require(bad == (found == rows.end() ? -1 : found - rows.begin()), "the place of a bad row");
  for (int64_t i = 0; bad < 0 && row_nbytes > 0 && i < count; ++i)
    require(std::memcmp(out.get() + i * row_nbytes, data + rows[as_size(i)] * stride,
                        as_size(row_nbytes)) == 0,
            "a gathered row");
}

}  // namespace fuzz
