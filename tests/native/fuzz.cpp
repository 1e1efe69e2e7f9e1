// A fuzzer of the native passes over memory: sizes, shapes, strides, indices and values are read
// from the input, all memory is allocated to the byte, and every result is held to a plain loop.
// With clang's -fsanitize=fuzzer it runs under libFuzzer, with random_inputs.cpp alone.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "data/augment.h"
#include "data/collate.h"
#include "data/gather.h"
#include "step/convert.h"
#include "step/math.h"
#include "step/ops.h"
#include "timer/clock.h"

namespace {

using fastamp::DType;
using Bytes = std::unique_ptr<char[]>;  // of exactly the size: one byte further is an error
using std::int64_t;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "wrong result: %s\n", what);
  std::abort();
}

std::size_t as_size(int64_t value) { return static_cast<std::size_t>(value); }

Bytes allocate(int64_t nbytes) {
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
  fastamp::stack_rows(spec, out.get(), 1 + input.take<std::uint8_t>() % 3);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t e = 0; e * spec.itemsize < nbytes; ++e)
      require(std::memcmp(out.get() + i * nbytes + e * spec.itemsize,
                          element_of(spec, as_size(i), e), as_size(spec.itemsize)) == 0,
              "an element of the stack");
}

/// The step that fills pixel (y, x) of the result, which is walked back to the image; or -1.
int find_fill(const fastamp::Images& images, std::uint64_t key, int64_t& y, int64_t& x) {
  for (int s = images.num_steps; s-- > 0;) {
    const fastamp::AugmentStep& step = images.steps[s];
    int64_t height = images.height;
    int64_t width = images.width;
    for (int before = 0; before < s; ++before)
      if (images.steps[before].kind == fastamp::StepKind::kCrop) {
        height = images.steps[before].height;
        width = images.steps[before].width;
      }
    if (step.kind == fastamp::StepKind::kFlip) {
      if (fastamp::draw(key, 2 * s + 1) < step.y_bound) x = width - 1 - x;
      continue;
    }
    const int64_t top = fastamp::draw_below(key, 2 * s + 1, step.y_bound) - step.top;
    const int64_t left = fastamp::draw_below(key, 2 * s + 2, step.x_bound) - step.left;
    if (step.kind == fastamp::StepKind::kCutout) {
      if (y >= top && y < top + step.height && x >= left && x < left + step.width) return s;
      continue;
    }
    y += top;
    x += left;
    if (y < 0 || y >= height || x < 0 || x >= width) return s;
  }
  return -1;
}

void fuzz_augment(Input& input) {
  fastamp::Images images{1 + input.number(4),
                         1 + input.number(40),
                         1 + input.number(80),
                         1 + input.number(15),
                         1,
                         {},
                         nullptr};
  images.num_steps += static_cast<int>(input.number(fastamp::kMaxSteps - 1));
  int64_t height = images.height;
  int64_t width = images.width;
  for (int s = 0; s < images.num_steps; ++s) {
    fastamp::AugmentStep& step = images.steps[s];
    step.kind = static_cast<fastamp::StepKind>(input.take<std::uint8_t>() % 3);
    step.y_bound = std::int64_t{input.take<std::uint8_t>()} << 24;
    if (step.kind == fastamp::StepKind::kFlip) continue;
    step = {step.kind, height, width, input.number(50), input.number(50), 1, 1};
    if (step.kind == fastamp::StepKind::kCutout) {
      step.height += input.number(90);
      step.width += input.number(90);
      continue;
    }
    const int64_t padded_height = height + step.top + input.number(20);
    const int64_t padded_width = width + step.left + input.number(20);
    height = step.height += input.number(padded_height - 1);
    width = step.width += input.number(padded_width - 1);
    step.y_bound = padded_height - height + 1;
    step.x_bound = padded_width - width + 1;
  }
  const int64_t size = images.pixel_nbytes;
  const int64_t plane_nbytes = images.height * images.width * size;
  Bytes fills = allocate(images.num_steps * images.planes * size);
  Bytes source = allocate(images.planes * plane_nbytes);
  input.fill(fills, images.num_steps * images.planes * size);
  input.fill(source, images.planes * plane_nbytes);
  images.fills = fills.get();
  const auto key = input.take<std::uint64_t>();
  require(fastamp::result_nbytes(images) == images.planes * height * width * size,
          "a result's size");
  const Bytes output = allocate(images.planes * height * width * size);
  fastamp::augment(images, key, source.get(), output.get());
  for (int64_t i = 0; i < images.planes * height * width; ++i) {
    const int64_t plane = i / (height * width);
    int64_t y = i / width % height;
    int64_t x = i % width;
    const int step = find_fill(images, key, y, x);
    const char* expected = step < 0
                               ? source.get() + plane * plane_nbytes + (y * images.width + x) * size
                               : fills.get() + (step * images.planes + plane) * size;
    require(std::memcmp(output.get() + i * size, expected, as_size(size)) == 0,
            "an augmented pixel");
  }
}

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

float element(const fastamp::TensorView& view, int64_t i) {
  const auto* at = static_cast<const char*>(view.data) + i * fastamp::size_of(view.dtype);
  std::uint32_t bits = 0;
  std::memcpy(&bits, at, as_size(fastamp::size_of(view.dtype)));
  const auto half = static_cast<std::uint16_t>(bits);
  switch (view.dtype) {
    case DType::kBFloat16:
      return fastamp::to_float(fastamp::BFloat16{half});
    case DType::kFloat16:
      return fastamp::to_float(fastamp::Float16{half});
    case DType::kFloat32:
      break;
  }
  return fastamp::float_of(bits);
}

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

void fuzz_step(Input& input) {
  fastamp::TensorList tensors;
  std::vector<Bytes> memory;
  int64_t chunks = 0;
  const bool is_tame = input.take<std::uint8_t>() % 2 == 0;
  for (int64_t n = input.number(20); n > 0; --n) {
    const auto dtype = static_cast<DType>(input.take<std::uint8_t>() % 3);
    const int64_t numel = 1 + input.number(70000 * (tensors.size() < 2 ? 2 : 0));
    const int64_t nbytes = numel * fastamp::size_of(dtype);
    memory.push_back(allocate(nbytes));
    input.fill(memory.back(), nbytes);
    if (is_tame)  // a positive exponent of 63 and below is finite in all three formats
      for (int64_t i = fastamp::size_of(dtype) - 1; i < nbytes; i += fastamp::size_of(dtype))
        memory.back()[as_size(i)] &= 0x3f;
    tensors.push_back({memory.back().get(), numel, dtype});
    chunks += fastamp::chunks_of(numel);
  }
  const auto norm = static_cast<fastamp::NormType>(input.take<std::uint8_t>() % 3);
  const float scale = input.take<float>();
  float skipped = 0;
  const fastamp::ClipSpec clip{input.take<std::uint8_t>() % 2 == 0 ? &scale : nullptr,
                               input.take<std::uint8_t>() % 2 == 0,
                               input.take<std::uint8_t>() % 2 == 0, input.take<float>(),
                               input.take<std::uint8_t>() % 2 == 0 ? &skipped : nullptr};
  const std::unique_ptr<double[]> work(new double[as_size(1 + chunks)]);
  fastamp::GradStats stats{};
  const fastamp::Launch launch{1 + input.take<std::uint8_t>() % 3, 0, nullptr};
  fastamp::cpu_ops().grad_stats(tensors, norm, clip, work.get(), &stats, launch);
  double expected = 0;
  bool is_finite = true;
  for (const auto& view : tensors)
    for (int64_t i = 0; i < view.numel; ++i) {
      const double x = std::fabs(static_cast<double>(element(view, i)));
      is_finite &= std::isfinite(x);
      expected = norm == fastamp::NormType::kInf
                     ? std::fmax(expected, x)
                     : expected + (norm == fastamp::NormType::kL1 ? x : x * x);
    }
  require(is_finite == std::isfinite(work[0]), "whether all gradients are finite");
  // Any order of adding at most 300,000 positive float64 numbers.
  if (is_finite) require(std::fabs(work[0] - expected) <= 1e-10 * expected, "the reduction");
  if (!is_finite) require(stats.found_inf == 1.0F, "found_inf");
  require(skipped == (clip.skipped == nullptr ? 0.0F : stats.found_inf), "the skipped steps");
  const float factor = input.take<std::uint8_t>() % 4 == 0 ? 1.0F : input.take<float>();
  std::vector<float> before;
  for (const auto& view : tensors)
    for (int64_t i = 0; i < view.numel; ++i) before.push_back(element(view, i));
  fastamp::cpu_ops().rescale(tensors, &factor, launch);
  std::size_t at = 0;
  for (const auto& view : tensors)
    for (int64_t i = 0; i < view.numel; ++i, ++at) {
      const float product = factor == 1.0F ? before[at] : before[at] * factor;
      const bool is_exact = view.dtype == DType::kFloat32 || factor == 1.0F;
      if (is_exact) require(same(element(view, i), product), "a rescaled gradient");
    }
}

/// Sums in pairs, as a lane of a strip is, to the bound that step/math.h proves for a strip.
template <typename Norm>
void fuzz_pairs(Input& input) {
  const bool is_tame = input.take<std::uint8_t>() % 2 == 0;
  fastamp::Pair sum{};
  float largest = 0;
  long double expected = 0;  // of 64 bits at least
  for (int64_t n = input.number(64); n > 0; --n) {
    std::uint32_t bits = input.take<std::uint32_t>();
    if (is_tame) bits = (bits & 0x81ffffffU) | 0x3e000000U;  // from 2^-3 to 2
    const float x = fastamp::float_of(bits);
    sum = fastamp::Pair::join(sum, Norm::pair(x));
    largest = std::fmax(largest, std::fabs(x));
    expected += static_cast<long double>(Norm::term(static_cast<double>(x)));
  }
  const bool is_accurate = fastamp::is_accurate<Norm>(sum, largest);
  const bool must_be = expected == 0 || (expected > 0x1p-95L && expected < 0x1p126L);
  require(is_accurate || !must_be, "whether a sum in pairs is accurate");
  const long double found = static_cast<long double>(sum.high) + static_cast<long double>(sum.low);
  if (is_accurate) require(std::fabs(found - expected) <= 0x1p-36L * expected, "the sum in pairs");
}

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

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  switch (input.take<std::uint8_t>() % 8) {
    case 0:
      fuzz_step(input);
      break;
    case 1:
      fuzz_clock(input);
      fuzz_pairs<fastamp::L1>(input);
      fuzz_pairs<fastamp::L2>(input);
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
