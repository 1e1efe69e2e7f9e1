// A faster way to read tensors than the exchange table, for lists of many small ones: the C shims
// that torch keeps stable for compiled models (aoti_torch, found by name, not linked), 15 ns for a
// tensor where the table takes 47. Used only where everything it assumes is seen at import.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace fastamp {

/// The shims, all of them or none. A handle is the address of the C++ tensor in a Python object.
struct Shims {
  using Handle = void*;
  std::int32_t (*data_ptr)(Handle, void**) = nullptr;
  std::int32_t (*dim)(Handle, std::int64_t*) = nullptr;
  std::int32_t (*sizes)(Handle, std::int64_t**) = nullptr;
  std::int32_t (*strides)(Handle, std::int64_t**) = nullptr;
  std::int32_t (*dtype)(Handle, std::int32_t*) = nullptr;
  std::int32_t (*layout)(Handle, std::int32_t*) = nullptr;
  std::int32_t (*device_type)(Handle, std::int32_t*) = nullptr;
  bool (*requires_grad)(const void* impl) = nullptr;

  explicit operator bool() const { return requires_grad != nullptr; }

  /// torch.Tensor keeps its C++ tensor, which is one pointer, right behind Python's header.
  static Handle handle_of(PyObject* tensor) {
    return reinterpret_cast<char*>(tensor) + sizeof(PyObject);
  }
  static const void* impl_of(PyObject* tensor) { return *static_cast<void**>(handle_of(tensor)); }
};

/// Finds the shims in the torch that is loaded, and tries them on two tensors.
Shims find_shims(const pybind11::module_& torch);

}  // namespace fastamp
