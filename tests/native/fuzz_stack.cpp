// Stacks of rows of any shape, and padded ones.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "data/collate.h"
#include "input.h"

namespace fuzz {

namespace {

/// The element at the place `index` of a batch's row: of its row, or the padding.
const char* element_of(const fastamp::StackSpec& spec, std::size_t row, int64_t index) {
  const std::size_t ndim = spec.row_shape.size();
  int64_t source = 0;
  int64_t stride = 1;
  for (std::size_t dim = ndim; dim-- > 0;) {
    const int64_t place = index % spec.row_shape[dim];
    const int64_t length =
        spec.shapes.empty() ? spec.row_shape[dim] : spec.shapes[row * ndim + dim];
    index /= spec.row_shape[dim];
    if (place >= length) return static_cast<const char*>(spec.pad);
    source += place * stride;
    stride *= length;
  }
  return static_cast<const char*>(spec.rows[row]) + source * spec.itemsize;
}

}  // namespace

void fuzz_stack(Input& input) {
  fastamp::StackSpec spec;
  const std::size_t ndim = as_size(input.number(4));
  const bool pads = ndim > 0 && input.take<std::uint8_t>() % 2 == 0;
  spec.itemsize = 1 + input.number(15);
  int64_t room = 1 << 16;
  for (std::size_t dim = 0; dim < ndim; ++dim) {
    spec.row_shape.push_back(input.number(std::min<int64_t>(room, 40000)));
    room /= std::max<int64_t>(1, spec.row_shape.back());
  }
  const bool is_empty =
      std::find(spec.row_shape.begin(), spec.row_shape.end(), 0) != spec.row_shape.end();
  if (is_empty && !pads)  // what torch allows beside a dimension of 0
    for (int64_t& length : spec.row_shape)
      if (length > 0 && input.take<std::uint8_t>() % 4 == 0)
        length = std::numeric_limits<int64_t>::max() / length;
  const int64_t count = input.number(room < 1000 ? 3 : 40);
  Bytes pad = allocate(spec.itemsize);
  input.fill(pad, spec.itemsize);
  spec.pad = pads ? pad.get() : nullptr;
  std::vector<Bytes> rows;
  for (int64_t i = 0; i < count; ++i) {
    int64_t nbytes = is_empty ? 0 : spec.itemsize;
    for (std::size_t dim = 0; dim < ndim && pads; ++dim) {
      const int64_t most = spec.row_shape[dim];
      spec.shapes.push_back(input.take<std::uint8_t>() % 4 == 0 ? input.number(most) : most);
    }
    for (std::size_t dim = 0; dim < ndim && !is_empty; ++dim)
      nbytes *= pads ? spec.shapes[as_size(i) * ndim + dim] : spec.row_shape[dim];
    rows.push_back(allocate(nbytes));
    input.fill(rows.back(), nbytes);
    spec.rows.push_back(rows.back().get());
  }
  const int64_t nbytes = fastamp::row_nbytes(spec);
  require(!is_empty || nbytes == 0, "bytes of an empty row");
  const Bytes out = allocate(count * nbytes);
  fastamp::stack_rows(spec, out.get());
  for (int64_t i = 0; i < count; ++i)
    for (int64_t e = 0; e * spec.itemsize < nbytes; ++e)
      require(std::memcmp(out.get() + i * nbytes + e * spec.itemsize,
                          element_of(spec, as_size(i), e), as_size(spec.itemsize)) == 0,
              "an element of the stack");
}

}  // namespace fuzz
