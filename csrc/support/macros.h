// The only preprocessor conditionals of the project: what differs between compilers and targets.
#pragma once

#include <cstddef>  // any header of the C library defines __GLIBC__

#ifdef __FAST_MATH__
#error "fastamp must not be built with -ffast-math: it makes every finiteness check true"
#endif

/// Marks arithmetic that host and device share.
#ifdef __CUDACC__
#define FASTAMP_HD __host__ __device__
#else
#define FASTAMP_HD
#endif

namespace fastamp {

/// A product that no compiler contracts with the sum that follows. On the host the files that need
/// it are compiled with -ffp-contract=off; emulated kernels are contracted, which tests it.
#ifdef __CUDA_ARCH__
#define FASTAMP_MULTIPLY(a, b, suffix) suffix(a, b)
#else
#define FASTAMP_MULTIPLY(a, b, suffix) ((a) * (b))
#endif
#ifdef FASTAMP_EMULATE
#define FASTAMP_ROUNDED __attribute__((noinline))
#else
#define FASTAMP_ROUNDED
#endif

FASTAMP_ROUNDED FASTAMP_HD inline float product(float a, float b) {
  return FASTAMP_MULTIPLY(a, b, __fmul_rn);
}
FASTAMP_ROUNDED FASTAMP_HD inline double product(double a, double b) {
  return FASTAMP_MULTIPLY(a, b, __dmul_rn);
}

}  // namespace fastamp

/// Compiles a function once per vector width and picks one when the module is loaded. It needs the
/// indirect functions of ELF with glibc, and the sanitizers run before those are resolved.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(FASTAMP_SANITIZE)
#define FASTAMP_SIMD_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FASTAMP_SIMD_CLONES
#endif

/// Inlining that the clones above depend on: only what is inlined is compiled for each width.
#define FASTAMP_INLINE inline __attribute__((always_inline))
#define FASTAMP_INLINE_LAMBDA __attribute__((always_inline))

/// Stores a vector of two long long past the caches, where the target can. FASTAMP_STREAM_END
/// orders such stores before what follows.
#if defined(__x86_64__) && !defined(__clang__)
#define FASTAMP_STREAM(to, block) __builtin_ia32_movntdq(to, block)
#define FASTAMP_STREAM_END() __builtin_ia32_sfence()
#else
#define FASTAMP_STREAM(to, block) (*(to) = (block))
#define FASTAMP_STREAM_END() static_cast<void>(0)
#endif
