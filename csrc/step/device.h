// CUDA runtime calls that throw, and the current device as a scope.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace fastamp {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string("CUDA error in ") + what + ": " + cudaGetErrorName(status) +
                           ": " + cudaGetErrorString(status));
}

/// Makes a device current, and the former one again at the end of the scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&former_), "cudaGetDevice");
    if (device == former_) return;
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) static_cast<void>(cudaSetDevice(former_));  // a destructor must not throw
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int former_ = 0;
  bool changed_ = false;
};

}  // namespace fastamp
