// The part of CUDA that the kernels use, on the host: included instead of CUDA's own header when
// the kernels are compiled as C++ for tests. These test tables, tails, alignment, barriers and the
// order of addition, but neither speed nor the memory model.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "grid.h"
#include "step/convert.h"

#define __host__
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __shared__ static    // blocks run one after the other, grids too
#define __grid_constant__ &  // `const Table __grid_constant__ table`: one for all threads

inline void __syncthreads() { fastamp::emulate::wait_for_block(); }

/// All shuffles are of whole warps; a source outside of it returns the thread's own value.
template <typename T>
T __shfl_sync(unsigned, T value, int source) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t) && std::is_trivially_copyable_v<T>);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = fastamp::emulate::exchange(bits, static_cast<unsigned>(source) % fastamp::emulate::kWarp);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, int offset) {
  const int lane = static_cast<int>(threadIdx.x % fastamp::emulate::kWarp);
  return __shfl_sync(mask, value, lane + offset < 32 ? lane + offset : lane);
}

enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidConfiguration,
  cudaErrorInvalidDevice,
  cudaErrorLaunchTimeout
};
using cudaStream_t = struct CUstream_st*;  // all work is done when a call returns

inline const char* cudaGetErrorName(cudaError_t error) {
  constexpr const char* kNames[] = {"cudaSuccess", "cudaErrorInvalidConfiguration",
                                    "cudaErrorInvalidDevice", "cudaErrorLaunchTimeout"};
  return kNames[error];
}

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchTimeout ? "not all threads come to a barrier" : "emulated";
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }  // errors are returned

namespace fastamp::emulate {
inline thread_local int device = 0;  // of a new thread, without a context
inline bool has_context[2] = {};     // of each device

inline int get_context_state(int of_device, unsigned*, int* is_active) {
  *is_active = has_context[of_device] ? 1 : 0;
  return 0;
}
}  // namespace fastamp::emulate

inline cudaError_t cudaGetDevice(int* device) {
  *device = fastamp::emulate::device;
  return cudaSuccess;
}

inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device > 1) return cudaErrorInvalidDevice;
  fastamp::emulate::device = device;
  fastamp::emulate::has_context[device] = true;
  return cudaSuccess;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
constexpr unsigned long long cudaEnableDefault = 0;

/// The one function of the driver that is asked for.
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&fastamp::emulate::get_context_state);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

struct cudaFuncAttributes {};

inline std::atomic<unsigned> emulated_launches{0};   // grids so far
inline std::atomic<unsigned> emulated_blocks{0};     // of them all
inline std::atomic<unsigned> emulated_arguments{0};  // bytes of the last one's

template <typename... Params>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*)(Params...)) {
  return cudaSuccess;
}

struct dim3 : fastamp::emulate::Index {
  dim3(unsigned size = 1) : Index{size} {}
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
};

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  static_assert((sizeof(std::remove_reference_t<Params>) + ... + 0) <= 32764, "CUDA's limit");
  const unsigned blocks = config->gridDim.x;
  const unsigned threads = config->blockDim.x;
  if (blocks == 0 || blocks > INT32_MAX || threads == 0 || threads > fastamp::emulate::kMaxThreads)
    return cudaErrorInvalidConfiguration;
  ++emulated_launches;
  emulated_blocks += blocks;
  emulated_arguments = (sizeof(std::remove_reference_t<Params>) + ... + 0);
  const auto thread = [&] { kernel(static_cast<Params>(args)...); };
  const auto call = [](const void* data) { (*static_cast<const decltype(thread)*>(data))(); };
  return fastamp::emulate::run_grid(blocks, threads, call, &thread) ? cudaSuccess
                                                                    : cudaErrorLaunchTimeout;
}
