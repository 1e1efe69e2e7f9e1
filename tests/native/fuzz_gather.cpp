// Batches that a queue gathers out of columns at any address and with any strides.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "data/queue.h"
#include "input.h"

namespace fuzz {

namespace {

/// A column with its memory, at any address, and in several parts.
struct Array {
  Bytes memory;
  const char* data;  // of row 0
  std::vector<Bytes> copies;
  fastamp::Column column;

  explicit Array(Input& input) {
    const int widened = (const int[]){0, 0, 1, 2, 4, -4}[input.take<std::uint8_t>() % 6];
    const int64_t item = widened == 0 ? 1 : std::abs(widened);
    const int64_t row_nbytes = item * input.number(20000);
    const int64_t num_rows = input.number(60);
    const int64_t offset = input.number(17);
    int64_t stride = input.take<std::uint8_t>() % 2 == 0 ? row_nbytes : input.number(20000);
    const int64_t span = num_rows == 0 ? 0 : (num_rows - 1) * stride + row_nbytes;
    memory = allocate(offset + span);
    input.fill(memory, offset + span);
    char* first = memory == nullptr ? nullptr : memory.get() + offset;
    if (num_rows > 0 && row_nbytes > 0 && input.take<std::uint8_t>() % 4 == 0) {
      first += (num_rows - 1) * stride;  // from the last row to the first
      stride = -stride;
    }
    data = first;
    column = {{{first, 0, span}}, num_rows, stride, row_nbytes, widened};
    if (stride >= 0 && stride % item == 0 && span > 0 && input.take<std::uint8_t>() % 2 == 0)
      split(input, span, item);
  }

  /// Copies the memory into parts of any length.
  void split(Input& input, int64_t span, int64_t item) {
    column.parts.clear();
    for (int64_t begin = 0; begin < span;) {
      const int64_t end = std::min(span, begin + item * (1 + input.number(span / item / 2)));
      copies.push_back(allocate(end - begin));
      std::memcpy(copies.back().get(), data + begin, as_size(end - begin));
      column.parts.push_back({copies.back().get(), begin, end});
      begin = end;
    }
  }

  int64_t out_nbytes() const {
    return column.widened == 0 ? column.row_nbytes
                               : column.row_nbytes / std::abs(column.widened) * 8;
  }

  bool is_row(const char* out, int64_t row) const {
    const char* source = data + row * column.row_stride;
    if (column.widened == 0) return std::memcmp(out, source, as_size(column.row_nbytes)) == 0;
    const int64_t item = std::abs(column.widened);
    for (int64_t i = 0; i * item < column.row_nbytes; ++i) {
      int64_t got = 0;
      std::memcpy(&got, out + i * 8, 8);
      int64_t expected = 0;
      std::memcpy(&expected, source + i * item, as_size(item));
      if (column.widened < 0) expected = static_cast<std::int32_t>(expected);
      if (got != expected) return false;
    }
    return true;
  }
};

/// One batch, with what it has to become.
struct Batch {
  std::vector<int64_t> indices;
  std::vector<Bytes> outputs;
  int64_t bad_position = -1;
  int64_t bad_rows = 0;

  Batch(Input& input, const std::vector<Array>& arrays) {
    const int64_t count = input.number(80);
    const int64_t edge = arrays.empty() ? 0 : arrays.front().column.num_rows;
    const bool is_wild = input.take<std::uint8_t>() % 4 == 0;
    for (int64_t i = 0; i < count; ++i)
      indices.push_back(is_wild ? input.any(edge) : input.number(std::max<int64_t>(edge - 1, 0)));
    indices.shrink_to_fit();
    for (const Array& array : arrays) outputs.push_back(allocate(count * array.out_nbytes()));
    for (const Array& array : arrays) {  // in the order in which the queue goes over them
      const int64_t rows = array.column.num_rows;
      const auto is_bad = [rows](int64_t i) { return i < -rows || i >= rows; };
      const auto found = std::find_if(indices.begin(), indices.end(), is_bad);
      if (found == indices.end()) continue;
      bad_position = found - indices.begin();
      bad_rows = rows;
      break;
    }
  }

  fastamp::GatherJob job() const {
    std::vector<char*> addresses;
    for (const Bytes& output : outputs) addresses.push_back(output.get());
    return {indices.data(), static_cast<int64_t>(indices.size()), addresses};
  }

  void check(const std::vector<Array>& arrays, const fastamp::GatherResult& result) const {
    require(!result.is_lost, "memory that is there");
    require(result.bad_position == bad_position, "the place of a bad index");
    require(bad_position < 0 || result.num_rows == bad_rows, "the length beside a bad index");
    for (std::size_t c = 0; c < arrays.size() && bad_position < 0; ++c)
      for (std::size_t i = 0; i < indices.size() && arrays[c].out_nbytes() > 0; ++i) {
        const int64_t index = indices[i];
        const int64_t row = index < 0 ? index + arrays[c].column.num_rows : index;
        const char* out = outputs[c].get() + static_cast<int64_t>(i) * arrays[c].out_nbytes();
        require(arrays[c].is_row(out, row), "a gathered row");
      }
  }
};

}  // namespace

void fuzz_gather(Input& input) {
  std::vector<Array> arrays;
  for (int64_t n = input.number(4); n > 0; --n) arrays.emplace_back(input);
  std::vector<fastamp::Column> columns;
  for (const Array& array : arrays) columns.push_back(array.column);
  std::vector<std::unique_ptr<Batch>> batches;
  for (int64_t n = input.number(6); n > 0; --n)
    batches.push_back(std::make_unique<Batch>(input, arrays));
  const int depth = 1 + input.take<std::uint8_t>() % 4;
  const int threads = input.take<std::uint8_t>() % 8 == 0 ? 1 + input.take<std::uint8_t>() % 2 : 0;
  fastamp::GatherQueue queue(columns, depth, threads);
  std::size_t submitted = 0;
  for (std::size_t delivered = 0; delivered < batches.size(); ++delivered) {
    while (submitted < batches.size() && submitted - delivered < as_size(depth))
      queue.submit(batches[submitted++]->job());
    if (input.take<std::uint8_t>() % 16 == 0) return;  // with jobs under way
    const auto result = queue.wait(60.0);
    require(result.has_value(), "a batch within a minute");
    batches[delivered]->check(arrays, *result);
  }
}

}  // namespace fuzz
