// CUDA runtime calls that throw, the current device as a scope, and the launch of a kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace fastamp {

inline void check_cuda(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // resets it, else the next call would return it again
  throw std::runtime_error("CUDA error in " + what + ": " + cudaGetErrorName(status) + ": " +
                           cudaGetErrorString(status));
}

/// Launches a kernel on one-dimensional blocks; errors name it. Every launch goes through here.
template <typename... Params, typename... Args>
void launch(const char* name, void (*kernel)(Params...), std::int64_t blocks, int threads,
            cudaStream_t stream, Args&&... args) {
  static_assert((sizeof(Params) + ... + 0) <= 32764, "CUDA's limit");
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
  if (status != cudaSuccess) check_cuda(status, std::string("the launch of ") + name);
}

/// Throws unless the current device has code for a kernel.
template <typename... Params>
void check_kernel(const char* name, void (*kernel)(Params...)) {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), name);
}

struct UpdateList;

/// Counts the step of all parameters, unless *found_inf is 1; null is 0. In cuda.cu.
void launch_count(const UpdateList& list, const float* found_inf, cudaStream_t stream);

/// Throws unless the current device has code for all of update.cu.
void check_update_kernels();

/// Whether a device has the runtime's context, which takes hundreds of megabytes.
inline bool has_context(int device) {
  using GetState = int(int device, unsigned* flags, int* is_active);  // returns 0 if it succeeds
  static GetState* const get_state = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check_cuda(cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found, 12000,
                                                cudaEnableDefault, &result),
               "cudaGetDriverEntryPointByVersion");
    return reinterpret_cast<GetState*>(found);
  }();
  unsigned flags = 0;
  int is_active = 0;
  return get_state != nullptr && get_state(device, &flags, &is_active) == 0 && is_active != 0;
}

/// Makes a device current, and the former one at the end of the scope, unless that would make a
/// context on it: device 0 has none where a new thread begins with another device.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&former_), "cudaGetDevice");
    if (device == former_) return;
    restores_ = has_context(former_);
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (restores_) static_cast<void>(cudaSetDevice(former_));  // a destructor must not throw
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int former_ = 0;
  bool restores_ = false;
};

}  // namespace fastamp
