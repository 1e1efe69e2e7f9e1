// The loader's part of the extension: finds the memory of samples, columns and batches, and has it
// copied without the GIL.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "data/collate.h"
#include "data/gather.h"
#include "module.h"
#include "tensor/tensors.h"

namespace fastamp {
namespace {

// Bytes of a batch from which on it pays to drop the GIL.
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

std::int64_t itemsize_of(dlpack::DataType dtype) { return (dtype.bits * dtype.lanes + 7) / 8; }

bool read_tensors(const py::tuple& samples, StackSpec& spec) {
  dlpack::DataType dtype{};
  for (const py::handle sample : samples) {
    dlpack::Tensor tensor;
    if (!read_host_tensor(sample, tensor)) return false;
    if (spec.rows.empty()) dtype = tensor.dtype;
    if (!(tensor.dtype == dtype) || !add_row(spec, tensor.data, tensor.ndim, tensor.shape))
      return false;
  }
  spec.itemsize = itemsize_of(dtype);
  return !samples.empty();
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
  dlpack::Tensor tensor;
  if (!read_host_tensor(out, tensor) || tensor.numel() * itemsize_of(tensor.dtype) != nbytes)
    throw std::runtime_error("allocate: expected a contiguous CPU tensor of " +
                             std::to_string(nbytes) + " bytes");
  return tensor.data;
}

py::object stack(const py::object& samples, const py::object& dtype, const py::object& allocate,
                 const py::object& pad) {
  // Other Python threads may change the list, but not the tuple.
  const auto owned = py::reinterpret_steal<py::tuple>(PySequence_Tuple(samples.ptr()));
  if (!owned) throw py::error_already_set();
  StackSpec spec;
  spec.rows.reserve(owned.size());
  if (!pad.is_none()) {
    dlpack::Tensor element;
    if (!read_host_tensor(pad, element)) return py::none();
    spec.pad = element.data;
  }
  const bool arrays = owned.size() > 0 && PyObject_CheckBuffer(owned[0].ptr()) != 0;
  if (!(arrays ? read_arrays(owned, spec) : read_tensors(owned, spec))) return py::none();
  py::tuple shape(1 + spec.row_shape.size());
  shape[0] = owned.size();
  for (std::size_t dim = 0; dim < spec.row_shape.size(); ++dim)
    shape[1 + dim] = spec.row_shape[dim];
  py::object out = allocate(shape, dtype);
  void* target = check_out(out, spec);
  if (static_cast<std::int64_t>(spec.rows.size()) * row_nbytes(spec) < kReleaseBytes) {
    stack_rows(spec, target);
  } else {
    const py::gil_scoped_release no_gil;
    stack_rows(spec, target);
  }
  return out;
}

/// Gathers the same rows of several tensors, whose rows are contiguous, into contiguous ones, all
/// on the CPU. Integers become those of the output.
void gather_rows(const py::list& arrays, const py::object& rows, const py::list& outs,
                 int num_threads) {
  dlpack::Tensor places;
  bool fits = read_host_tensor(rows, places) && itemsize_of(places.dtype) == sizeof(std::int64_t) &&
              arrays.size() == outs.size();
  std::vector<Column> columns(outs.size());
  std::vector<char*> targets(outs.size());
  for (std::size_t i = 0; fits && i < outs.size(); ++i) {
    dlpack::Tensor array;
    dlpack::Tensor target;
    fits = read_rows(arrays[i], array) && read_host_tensor(outs[i], target);
    if (!fits) break;
    const std::int64_t itemsize = itemsize_of(array.dtype);
    const std::int64_t numel = places.numel() == 0 ? 0 : target.numel() / places.numel();
    const auto size = static_cast<int>(array.dtype.code == dlpack::kInt ? -itemsize : itemsize);
    columns[i] = {static_cast<const char*>(array.data), array.shape[0], array.strides[0] * itemsize,
                  numel * itemsize, array.dtype == target.dtype ? 0 : size};
    targets[i] = static_cast<char*>(target.data);
  }
  if (!fits) throw py::type_error("arrays, rows, outs: expected tensors on the CPU, rows of int64");
  const auto* all = static_cast<const std::int64_t*>(places.data);
  const py::gil_scoped_release no_gil;
  for (std::size_t i = 0; i < columns.size(); ++i) {
    const std::int64_t bad = gather(columns[i], all, places.numel(), targets[i], num_threads);
    if (bad >= 0)
      throw std::out_of_range("index " + std::to_string(all[bad]) +
                              " is out of bounds for dimension 0 with size " +
                              std::to_string(columns[i].num_rows));
  }
}

}  // namespace

// Documented in fastamp/data/sources.py and fastamp/data/collate.py.
void define_data(py::module_& module) {
  module.def("gather", &gather_rows, py::arg("arrays"), py::arg("rows"), py::arg("outs"),
             py::arg("num_threads"));
  module.def("stack", &stack, py::arg("samples"), py::arg("dtype"), py::arg("allocate"),
             py::arg("pad") = py::none());
}

}  // namespace fastamp
