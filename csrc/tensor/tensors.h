// How the core sees torch's tensors: read in place, never owned, without linking to torch.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "tensor/dlpack.h"
#include "tensor/view.h"

namespace fastamp {

namespace py = pybind11;

/// A list of tensors of one device, unpacked once for several ops. It keeps them alive.
struct PackedTensors {
  py::tuple tensors;      ///< all of them, `rest` included
  int device_index = -1;  ///< -1 for the CPU
  TensorList views;
  std::vector<std::int64_t> rest;  ///< indices of what the core does not take
  std::int64_t num_chunks = 0;
  bool has_float16 = false;  ///< in what the core takes
};

/// A contiguous tensor in host memory, read in place; `shape` lives as long as the tensor.
struct HostTensor {
  void* data;
  int ndim;
  const std::int64_t* shape;
  std::int64_t numel;
  dlpack::DataType dtype;
};

/// Reads a tensor whose bytes are its values: a plain one without gradient, conjugation or
/// negation. Says no to every other, and to all of them without torch's exchange table.
bool read_host_tensor(py::handle object, HostTensor& tensor);

/// Returns the address of a dense tensor of the given type that has at least `numel` elements, and
/// raises a TypeError that names `argument` otherwise.
void* data_of(py::handle tensor, dlpack::DataType dtype, std::int64_t numel, const char* argument);

/// Returns the current stream of a CUDA device, as torch's exchange table tells it.
void* current_stream(int device_index);

}  // namespace fastamp
