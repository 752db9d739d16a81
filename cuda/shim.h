// One source for two compilers: NVRTC makes GPU code of it, a C compiler makes a library for tests
// on the CPU.
//
// Kernels keep to what C and CUDA C++ share. A kernel takes one struct, by value, which the Rust
// side declares once more:
//
//     KERNEL(scale, struct Scale, p) { ... p.factor ... }
//
// On the CPU that becomes `void scale_launch(unsigned grid[3], unsigned block[3], void
// **parameters)`; see cpu.h.
//
// Arithmetic is IEEE's, to the bit: nothing is fused (-fmad=false, -ffp-contract=off), denormals
// are kept, and conversions are written out here instead of being taken from either compiler.
#pragma once

// Threads of a block, in all launches.
#define THREADS 256
#define WARP 32
#define WARPS (THREADS / WARP)
#define ALL_LANES 0xffffffffu

#ifdef __CUDACC__

typedef int i32;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define BLOCKS_RUN_AT_ONCE 1
#define SHARED(Type, name)           \
    __shared__ Type name##_memory;   \
    Type *name = &name##_memory
#define KERNEL(name, Parameters, p) extern "C" __global__ void __launch_bounds__(THREADS) name(const Parameters p)

DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE u64 bits_of_double(double x) { return (u64)__double_as_longlong(x); }
DEVICE double double_of(u64 bits) { return __longlong_as_double((long long)bits); }

// Between two looks at a word.
DEVICE void rest(void) { __nanosleep(1000); }

#else
#include "cpu.h"
#endif

// Memory at an address that came as a number.
#define AT(Type, address) ((Type *)(size_t)(address))

// A status word is 0 while all is well, then the first error: its code, and in the upper 24 bits
// what it is about. The same codes stand in src/error/device.rs.
enum {
    EXPERT_OUT_OF_RANGE = 1,
    RANK_OUT_OF_RANGE = 2,
    OTHER_CALL = 3,
    OTHER_DIGEST = 4,
    PLACE_OUT_OF_RANGE = 5,
    INDEX_OUT_OF_RANGE = 6,
    OVER_BUDGET = 7,
    REFUSED = 8,
};

DEVICE void report(u64 status, u32 code, u32 about) { atomicCAS(AT(u32, status), 0u, code | about << 8); }
