// CUDA C++ for a host compiler: kernels/*.cu compiled with -DAPPLIANCE_EMULATE include this instead of the CUDA headers.
//
// build.py preprocesses a kernel file, finds its `extern "C" __global__` functions and appends EMULATOR_EXPORT for each;
// __global__ and __launch_bounds__ are therefore not defined here. Types and overloads are as strict as nvcc's.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <initializer_list>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

#include "runtime.h"

#define __device__
#define __host__
#define __constant__ static
#define __grid_constant__
#define __forceinline__ __inline__  // always_inline doubles the time to compile and gains nothing here
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define alignas(bytes) __attribute__((aligned(bytes)))  // nvcc accepts it after __shared__
// Thread-local storage of the library holds nothing but shared arrays: the runtime knows its address and size, and
// poisons it before each block.
#define __shared__ static thread_local
#define DYNAMIC_SHARED(name) uint8_t* const name = ::emulator::dynamic_shared()

#define threadIdx (::emulator::current->index)
#define blockIdx (::emulator::current->block->index)
#define blockDim (::emulator::current->block->size)
#define gridDim (::emulator::current->block->grid)
constexpr int warpSize = 32;

#include "cuda_types.h"

#include "cuda_intrinsics.h"

#include "cuda_warp.h"

#include "cuda_ptx.h"

#include "cuda_export.h"
