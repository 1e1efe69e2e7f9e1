// The loader's part of the extension: finds the memory of samples, columns and batches, and has it
// copied without the GIL.
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "data/collate.h"
#include "data/queue.h"
#include "module.h"
#include "tensor/tensors.h"

namespace fastamp {
namespace {

// Bytes of a batch from which on it pays to drop the GIL and to copy with more than one thread.
constexpr std::int64_t kReleaseBytes = 256 * 1024;

/// Adds a row, unless its shape does not go with the rows before: padding allows lengths to differ.
template <typename Length>
bool add_row(StackSpec& spec, const void* data, int ndim, const Length* shape) {
  std::vector<std::int64_t>& longest = spec.row_shape;
  if (spec.rows.empty()) longest.assign(shape, shape + ndim);
  spec.rows.push_back(data);
  if (static_cast<std::size_t>(ndim) != longest.size()) return false;
  if (spec.pad == nullptr) return std::equal(longest.begin(), longest.end(), shape);
  for (std::size_t dim = 0; dim < longest.size(); ++dim) {
    spec.shapes.push_back(shape[dim]);
    longest[dim] = std::max<std::int64_t>(longest[dim], shape[dim]);
  }
  return true;
}

/// Rounds up the dimensions that differ, and the only one of a vector.
void round_up(StackSpec& spec, std::int64_t multiple) {
  const std::size_t ndim = spec.row_shape.size();
  bool differ = false;
  for (std::size_t dim = 0; dim < ndim; ++dim) {
    std::int64_t& longest = spec.row_shape[dim];
    bool ragged = ndim == 1;
    for (std::size_t i = dim; i < spec.shapes.size(); i += ndim)
      ragged |= spec.shapes[i] != longest;
    if (ragged) longest = (longest + multiple - 1) / multiple * multiple;
    differ |= ragged;
  }
  if (!differ) spec.shapes.clear();
}

std::int64_t itemsize_of(dlpack::DataType dtype) { return (dtype.bits * dtype.lanes + 7) / 8; }

bool read_tensors(const py::tuple& samples, StackSpec& spec) {
  if (samples.empty()) return false;
  HostTensor first;
  if (!read_host_tensor(samples[0], first)) return false;
  spec.itemsize = itemsize_of(first.dtype);
  if (spec.pad == nullptr) {  // most batches: as little as possible for each sample
    spec.row_shape.assign(first.shape, first.shape + first.ndim);
    spec.rows.assign(samples.size(), first.data);
    return read_alike(samples, first, spec.rows.data());
  }
  for (const py::handle sample : samples) {
    HostTensor tensor;
    if (!read_host_tensor(sample, tensor) || !(tensor.dtype == first.dtype) ||
        !add_row(spec, tensor.data, tensor.ndim, tensor.shape))
      return false;
  }
  return true;
}

/// Reads arrays of one type and one dtype, which is known to be one of torch's.
bool read_arrays(const py::tuple& samples, StackSpec& spec) {
  const py::handle type = py::type::handle_of(samples[0]);
  const py::object dtype = py::getattr(samples[0], "dtype");
  const py::str name("dtype");
  for (const py::handle sample : samples) {
    if (!py::type::handle_of(sample).is(type)) return false;
    const py::object own = py::getattr(sample, name);
    if (!own.is(dtype) && !own.equal(dtype)) return false;
    Py_buffer buffer;
    if (PyObject_GetBuffer(sample.ptr(), &buffer, PyBUF_C_CONTIGUOUS) != 0) {
      PyErr_Clear();
      return false;
    }
    spec.itemsize = buffer.itemsize;
    const bool fits = add_row(spec, buffer.buf, buffer.ndim, buffer.shape);
    PyBuffer_Release(&buffer);  // the tuple keeps the array, and its memory, as it is
    if (!fits) return false;
  }
  return true;
}

/// Returns the address of the batch's memory, after a check of its size.
void* check_out(const py::object& out, const StackSpec& spec) {
  const std::int64_t nbytes = static_cast<std::int64_t>(spec.rows.size()) * row_nbytes(spec);
  HostTensor tensor;
  if (!read_host_tensor(out, tensor) || tensor.numel * itemsize_of(tensor.dtype) != nbytes)
    throw std::runtime_error("allocate: expected a contiguous CPU tensor of " +
                             std::to_string(nbytes) + " bytes");
  return tensor.data;
}

py::object stack(const py::object& samples, const py::object& dtype, const py::object& allocate,
                 const py::object& pad, std::int64_t multiple) {
  // Other Python threads may change the list, but not the tuple.
  const auto owned = py::reinterpret_steal<py::tuple>(PySequence_Tuple(samples.ptr()));
  if (!owned) throw py::error_already_set();
  StackSpec spec;
  spec.rows.reserve(owned.size());
  if (!pad.is_none()) {
    HostTensor element;
    if (!read_host_tensor(pad, element)) return py::none();
    spec.pad = element.data;
  }
  const bool arrays = owned.size() > 0 && PyObject_CheckBuffer(owned[0].ptr()) != 0;
  if (!(arrays ? read_arrays(owned, spec) : read_tensors(owned, spec))) return py::none();
  if (spec.pad != nullptr) round_up(spec, multiple);
  py::tuple shape(1 + spec.row_shape.size());
  shape[0] = owned.size();
  for (std::size_t dim = 0; dim < spec.row_shape.size(); ++dim)
    shape[1 + dim] = spec.row_shape[dim];
  py::object out = allocate(shape, dtype);
  void* target = check_out(out, spec);
  if (static_cast<std::int64_t>(spec.rows.size()) * row_nbytes(spec) < kReleaseBytes) {
    stack_rows(spec, target, 1);
  } else {
    const int num_threads = py::module_::import("torch").attr("get_num_threads")().cast<int>();
    const py::gil_scoped_release no_gil;
    stack_rows(spec, target, num_threads);
  }
  return out;
}

/// Returns the values of dicts, a tuple for each key; None if a sample is no dict or lacks a key.
py::object columns(const py::tuple& samples, const py::tuple& keys) {
  const Py_ssize_t count = PyTuple_GET_SIZE(samples.ptr());
  py::tuple found(keys.size());
  for (std::size_t k = 0; k < keys.size(); ++k) found[k] = py::tuple(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* sample = PyTuple_GET_ITEM(samples.ptr(), i);
    if (!PyDict_CheckExact(sample)) return py::none();
    Py_ssize_t next = 0;
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(keys.ptr()); ++k) {
      PyObject *key = nullptr, *value = nullptr, *wanted = PyTuple_GET_ITEM(keys.ptr(), k);
      // Most samples have the keys in the order of the first one: a walk needs no look-up.
      if (PyDict_Next(sample, &next, &key, &value) == 0 || key != wanted)
        value = PyDict_GetItemWithError(sample, wanted);
      if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
      if (value == nullptr) return py::none();
      PyTuple_SET_ITEM(PyTuple_GET_ITEM(found.ptr(), k), i, Py_NewRef(value));
    }
  }
  return std::move(found);
}

// How long Ctrl-C may have to wait.
constexpr double kSignalCheck_s = 0.1;

/// Kind, y_bound, x_bound, top, left, height and width of a step.
using StepArguments = std::array<std::int64_t, 7>;

/// Planes, height, width and pixel_nbytes of images, and their steps.
using ImageArguments =
    std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::vector<StepArguments>>;

/// Address and bytes of each part of a column; its num_rows, row_stride, row_nbytes, widened and
/// images.
using ColumnArguments =
    std::tuple<std::vector<std::pair<std::uintptr_t, std::int64_t>>, std::int64_t, std::int64_t,
               std::int64_t, int, std::optional<ImageArguments>>;

Images unpack(const ImageArguments& arguments) {
  const auto& [planes, height, width, pixel_nbytes, steps] = arguments;
  if (steps.size() > kMaxSteps) throw std::invalid_argument("columns: too many steps");
  Images images{planes, height, width, pixel_nbytes, 0, {}};
  for (const auto& [kind, y_bound, x_bound, top, left, result_height, result_width] : steps)
    images.steps[images.num_steps++] = {
        static_cast<StepKind>(kind), y_bound, x_bound, top, left, result_height, result_width};
  return images;
}

void augment_image(const ImageArguments& arguments, std::uint64_t key, std::uintptr_t source,
                   std::uintptr_t output) {
  augment(unpack(arguments), key, reinterpret_cast<const char*>(source),
          reinterpret_cast<char*>(output));
}

std::vector<Column> unpack(const std::vector<ColumnArguments>& arguments) {
  std::vector<Column> columns;
  for (const auto& [memory, num_rows, row_stride, row_nbytes, widened, images] : arguments) {
    if (memory.empty()) throw std::invalid_argument("columns: expected at least one part");
    Column& column = columns.emplace_back(
        Column{{}, num_rows, row_stride, row_nbytes, widened, images ? unpack(*images) : Images{}});
    std::int64_t begin = 0;
    for (const auto& [address, nbytes] : memory) {
      column.parts.push_back({reinterpret_cast<const char*>(address), begin, begin + nbytes});
      begin += nbytes;
    }
  }
  return columns;
}

template <typename T>
T* address_of(py::handle tensor) {
  return reinterpret_cast<T*>(tensor.attr("data_ptr")().cast<std::uintptr_t>());
}

/// A queue with the objects that own the memory of its columns and jobs.
class Gatherer {
 public:
  Gatherer(const std::vector<ColumnArguments>& columns, int depth, int num_threads,
           py::object owner)
      : columns_owner_(std::move(owner)), queue_(unpack(columns), depth, num_threads) {}

  void submit(const py::object& indices, const py::sequence& outputs, const py::object& keys) {
    GatherJob job{
        address_of<std::int64_t>(indices), indices.attr("numel")().cast<std::int64_t>(), {}};
    for (const py::handle output : outputs) job.outputs.push_back(address_of<char>(output));
    if (!keys.is_none()) job.keys = address_of<std::uint64_t>(keys);
    queue_.submit(std::move(job));
    jobs_.push_back(py::make_tuple(indices, py::tuple(outputs), keys));
  }

  bool is_ready() { return queue_.is_ready(); }

  double wait() {
    if (is_waiting_) throw std::runtime_error("another thread waits for a batch of this iterator");
    const Waiting waiting(is_waiting_);
    std::optional<GatherResult> result;
    while (!result) {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      const py::gil_scoped_release no_gil;
      result = queue_.wait(kSignalCheck_s);
    }
    const py::tuple job = std::move(jobs_.front());
    jobs_.pop_front();
    if (result->is_lost)
      throw py::buffer_error(
          "dataset: its memory is gone: it was freed, or its file was truncated, during the pass");
    if (result->bad_position < 0) return result->elapsed_s;
    throw py::index_error(
        "index " + std::to_string(address_of<std::int64_t>(job[0])[result->bad_position]) +
        " is out of bounds for dimension 0 with size " + std::to_string(result->num_rows));
  }

 private:
  /// Sets a flag while a thread waits. The GIL guards the flag.
  struct Waiting {
    explicit Waiting(bool& flag) : flag_(flag) { flag_ = true; }
    ~Waiting() { flag_ = false; }
    bool& flag_;
  };

  py::object columns_owner_;
  std::deque<py::tuple> jobs_;  // indices, outputs and keys
  bool is_waiting_ = false;
  GatherQueue queue_;  // last, so that it is destroyed first: its threads read the memory
};

}  // namespace

// Documented in fastamp/data/columns.py and fastamp/data/collate.py.
void define_data(py::module_& module) {
  module.def("augment_image", &augment_image, py::arg("images"), py::arg("key"), py::arg("source"),
             py::arg("output"));
  module.def("columns", &columns, py::arg("samples"), py::arg("keys"));
  module.def("stack", &stack, py::arg("samples"), py::arg("dtype"), py::arg("allocate"),
             py::arg("pad") = py::none(), py::arg("multiple") = 1);
  py::class_<Gatherer>(module, "Gatherer")
      .def(py::init<const std::vector<ColumnArguments>&, int, int, py::object>(),
           py::arg("columns"), py::arg("depth"), py::arg("num_threads"), py::arg("owner"))
      .def("submit", &Gatherer::submit, py::arg("indices"), py::arg("outputs"),
           py::arg("keys") = py::none())
      .def("is_ready", &Gatherer::is_ready)
      .def("wait", &Gatherer::wait);
}

}  // namespace fastamp
