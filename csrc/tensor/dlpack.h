// The part of the DLPack 1.x ABI that reads a tensor without owning it, written by hand: the layout
// is published and fixed for the major version (https://dmlc.github.io/dlpack/latest/c_api.html).
#pragma once

#include <cstdint>

namespace fastamp::dlpack {

constexpr std::uint32_t kMajorVersion = 1;
constexpr const char* kCapsuleName = "dlpack_exchange_api";

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3 };
enum TypeCode : std::uint8_t { kInt, kUInt, kFloat, kBfloat = 4, kComplex, kBool };

struct Device {
  std::int32_t type;
  std::int32_t index;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;

  std::int64_t numel() const {
    std::int64_t found = 1;
    for (std::int32_t i = 0; i < ndim; ++i) found *= shape[i];
    return found;
  }
};

constexpr bool operator==(DataType a, DataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

/// The table behind `torch.Tensor.__dlpack_c_exchange_api__`. The entries that take or give
/// ownership are not used here and stay untyped.
struct ExchangeApi {
  struct {
    std::uint32_t major;
    std::uint32_t minor;
  } version;
  ExchangeApi* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  int (*tensor_from_py_object)(void* object, Tensor* out);
  int (*current_work_stream)(DeviceType type, std::int32_t index, void** stream);
};

}  // namespace fastamp::dlpack
