// Copies the samples of a batch into one block of memory, and pads shorter ones.
#include "data/collate.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

namespace fastamp {
namespace {

/// Repeats an element, in copies that double.
void fill(char* out, std::int64_t nbytes, const void* element, std::int64_t itemsize) {
  if (nbytes == 0) return;
  std::memcpy(out, element, static_cast<std::size_t>(itemsize));
  for (std::int64_t done = itemsize; done < nbytes; done *= 2)
    std::memcpy(out + done, out, static_cast<std::size_t>(std::min(done, nbytes - done)));
}

/// One row whose lengths are `shape`, on its way into a row of the batch.
struct PaddedCopy {
  const StackSpec& spec;
  const std::int64_t* strides;  ///< bytes of the batch that one index of a dimension spans
  const std::int64_t* shape;
  std::size_t last;  ///< in the dimensions after this one the row is as long as the batch's
  const char* row;
  char* out;

  /// Copies the row from dimension `dim` on, and pads it.
  void copy(std::size_t dim) {
    const std::int64_t length = shape[dim];
    if (dim == last) {
      const std::int64_t nbytes = length * strides[dim];
      if (nbytes > 0) std::memcpy(out, row, static_cast<std::size_t>(nbytes));
      row += nbytes;
      out += nbytes;
    } else {
      for (std::int64_t i = 0; i < length; ++i) copy(dim + 1);
    }
    const std::int64_t missing = (spec.row_shape[dim] - length) * strides[dim];
    fill(out, missing, spec.pad, spec.itemsize);
    out += missing;
  }
};

void copy_padded_rows(const StackSpec& spec, char* out) {
  const std::size_t ndim = spec.row_shape.size();
  std::vector<std::int64_t> strides(ndim, spec.itemsize);
  for (std::size_t dim = ndim - 1; dim > 0; --dim)
    strides[dim - 1] = strides[dim] * spec.row_shape[dim];
  for (std::size_t i = 0; i < spec.rows.size(); ++i) {
    const std::int64_t* shape = spec.shapes.data() + i * ndim;
    std::size_t last = ndim - 1;
    while (last > 0 && shape[last] == spec.row_shape[last]) --last;
    PaddedCopy row{spec, strides.data(), shape, last, static_cast<const char*>(spec.rows[i]), out};
    row.copy(0);
    out = row.out;
  }
}

}  // namespace

std::int64_t row_nbytes(const StackSpec& spec) {
  const auto& shape = spec.row_shape;
  // Beside a length of 0 the others may be too large for a product.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  std::int64_t nbytes = spec.itemsize;
  for (const std::int64_t length : shape) nbytes *= length;
  return nbytes;
}

void stack_rows(const StackSpec& spec, void* out) {
  const std::int64_t nbytes = row_nbytes(spec);
  if (nbytes == 0) return;
  auto* target = static_cast<char*>(out);
  if (!spec.shapes.empty()) return copy_padded_rows(spec, target);
  for (const void* row : spec.rows) {
    std::memcpy(target, row, static_cast<std::size_t>(nbytes));
    target += nbytes;
  }
}

}  // namespace fastamp
