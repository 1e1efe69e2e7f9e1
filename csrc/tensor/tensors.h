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

/// Looks up torch's types and its exchange table; returns whether the table exists.
bool attach_torch();

/// Reads a plain tensor on a device whose elements fill its memory, in any order of dimensions;
/// returns false for every other. Its sizes and strides live as long as the tensor.
bool read_dense(py::handle object, dlpack::Device device, dlpack::Tensor& tensor);

/// Returns the format of a dtype that the passes handle: floats of 32 or 16 bits.
std::optional<Format> format_of(dlpack::DataType dtype);

/// Whether two dense tensors have the same sizes, and their elements the same order in memory: of
/// `other`, each element is `times` elements of the first.
bool is_alike(const dlpack::Tensor& one, const dlpack::Tensor& other, std::int64_t times = 1);

/// Whether a dense tensor is a negated view. torch's are imaginary parts of conjugates, which have
/// gaps between elements, so that a dense one has at most one element.
bool is_negated(py::handle tensor, std::int64_t numel);

/// Returns a plain tensor's gradient, or None; null if this is not a plain tensor.
py::object grad_of(py::handle tensor);

/// Sets a plain tensor's gradient to None.
void drop_grad(py::handle tensor);

/// Reads a plain contiguous tensor on the host that requires no grad and is no view that negates.
bool read_host_tensor(py::handle object, dlpack::Tensor& tensor);

/// Reads a plain tensor on the host whose rows are contiguous; they may overlap, or lie apart.
bool read_rows(py::handle object, dlpack::Tensor& tensor);

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
