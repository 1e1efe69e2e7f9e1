// How the core sees torch's tensors: read in place through torch's DLPack exchange table (torch
// 2.10 and later), never owned, without linking to torch.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>

#include "tensor/dlpack.h"
#include "tensor/view.h"

namespace fastamp {

namespace py = pybind11;

constexpr dlpack::Device kHost{dlpack::kCpu, 0};
constexpr dlpack::DataType kFloat32{dlpack::kFloat, 32, 1};
constexpr dlpack::DataType kFloat64{dlpack::kFloat, 64, 1};
constexpr dlpack::DataType kByte{dlpack::kUInt, 8, 1};

/// A contiguous tensor in host memory, read in place; `shape` lives as long as the tensor.
struct HostTensor {
  void* data;
  int ndim;
  const std::int64_t* shape;
  std::int64_t numel;
  dlpack::DataType dtype;
};

/// Looks up torch's types and its exchange table. Returns whether the table exists; without it no
/// tensor can be read.
bool attach_torch();

/// A tensor's sizes and strides, which live as long as the tensor.
struct Strides {
  int ndim;
  const std::int64_t* shape;
  const std::int64_t* strides;

  std::int64_t numel() const {
    std::int64_t found = 1;
    for (int i = 0; i < ndim; ++i) found *= shape[i];
    return found;
  }
};

/// Reads a float32, bfloat16 or float16 tensor on a device whose elements fill its memory without
/// gaps, in any order of dimensions, and its strides if asked; nothing for every other, subclasses
/// included.
std::optional<TensorView> read_dense(py::handle object, dlpack::Device device,
                                     Strides* strides = nullptr);

/// Reads a dense tensor of another dtype in the same way; nothing for every other dtype.
std::optional<void*> read_dense_of(py::handle object, dlpack::DataType dtype, dlpack::Device device,
                                   Strides* strides);

/// Whether two dense tensors have the same shape, and their elements the same order in memory.
bool is_alike(const Strides& one, const Strides& other);

/// Whether a dense tensor is a negated view. torch's are imaginary parts of conjugates, which have
/// gaps between elements, so that a dense one has at most one element.
bool is_negated(py::handle tensor, std::int64_t numel);

/// Returns a plain tensor's gradient, or None; null if this is not a plain tensor.
py::object grad_of(py::handle tensor);

/// Sets a plain tensor's gradient to None.
void drop_grad(py::handle tensor);

/// Reads a contiguous tensor whose bytes are its values: a plain one that does not require grad and
/// is no conjugated or negated view. Returns false for every other.
bool read_host_tensor(py::handle object, HostTensor& tensor);

/// Writes the addresses of all samples but the first into `rows`. Returns false unless each is such
/// a tensor, of the shape and dtype of `first`, and not empty.
bool read_alike(const py::tuple& samples, const HostTensor& first, const void** rows);

/// Returns the address of a dense tensor on a device, of the given type, that has at least `numel`
/// elements, and raises a TypeError that names `argument` otherwise.
void* data_of(py::handle tensor, dlpack::DataType dtype, std::int64_t numel, dlpack::Device device,
              const char* argument);

/// Returns a new tensor of one dimension from torch.empty, float32 or float64.
py::object new_tensor(std::int64_t numel, dlpack::DataType dtype, py::handle device);

/// Tells autograd that tensors were written: a tuple or list of them, of any types.
void increment_versions(py::handle tensors);

/// Returns torch's number of threads.
int num_threads();

/// Returns the current stream of a CUDA device, from torch's exchange table.
void* current_stream(int device_index);

}  // namespace fastamp
