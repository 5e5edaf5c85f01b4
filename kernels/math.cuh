// Arithmetic that several kernels must do with the same bits: each function exists once, here.
//
// Compiled with -fmad=false, so a*b + c rounds twice unless it is written fmaf.
#pragma once
#include "common.cuh"

namespace ptx {  // PTX ISA, "ex2" and "rcp": at most 2 and 1 units in the last place off; subnormals are zero

__device__ __forceinline__ float exp2_approx(float x) {
#ifdef APPLIANCE_EMULATE
    float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

__device__ __forceinline__ float reciprocal_approx(float x) {
#ifdef APPLIANCE_EMULATE
    float y = 1.0f / x;
    return fabsf(y) < 1.17549435e-38f ? copysignf(0.0f, y) : y;
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

}  // namespace ptx

// 2^x; 2^-inf = 0. The only exponential of attention, so that decode and prefill agree.
__device__ __forceinline__ float exp2_fixed(float x) { return ptx::exp2_approx(x); }

// e^x, relative error about 1e-7 (2 + |x|).
__device__ __forceinline__ float expf_fixed(float x) { return exp2_fixed(__fmul_rn(x, 1.44269504f)); }

// silu(g) * u, silu(g) = g / (1 + e^-g) (Shazeer 2020, arXiv 2002.05202), before its rounding to bf16. A g below -88 gives
// 0 times u; NaN and +inf pass through. The error is 4 units in the last place of fp32 plus that of e^-g.
__device__ __forceinline__ float swiglu(float g, float u) {
    return __fmul_rn(__fmul_rn(g, ptx::reciprocal_approx(__fadd_rn(1.0f, expf_fixed(-g)))), u);
}

// Two numbers rounded to bf16 (nearest, ties to even), `low` at the lower address.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    return (uint32_t)__bfloat16_as_ushort(__float2bfloat16_rn(low)) | (uint32_t)__bfloat16_as_ushort(__float2bfloat16_rn(high)) << 16;
}

// ---- sums in the canonical order ---------------------------------------------------------------------------------
// The sum of n numbers is that of a full binary tree over their indices, padded with zeros to a power of two: neighbours
// k, k^1 first, then pairs k, k^2, then k^4 ... Addition commutes, so a butterfly of shuffles gives each lane the same
// bits, whatever the number of threads.

template <int N> __device__ __forceinline__ float tree_sum(const float (&v)[N]) {  // N a power of two
    float t[N];
#pragma unroll
    for (int i = 0; i < N; i++) t[i] = v[i];
#pragma unroll
    for (int step = 1; step < N; step *= 2)
#pragma unroll
        for (int i = 0; i < N; i += 2 * step) t[i] = __fadd_rn(t[i], t[i + step]);
    return t[0];
}

// Over the `lanes` (a power of two) neighbouring lanes; every lane of the warp takes part and gets its group's sum.
__device__ __forceinline__ float warp_tree_sum(float v, int lanes = 32) {
    for (int step = 1; step < lanes; step *= 2) v = __fadd_rn(v, __shfl_xor_sync(0xFFFFFFFFu, v, step));
    return v;
}

// Over the block's `warps` (1..32) full warps, in thread order; every thread gets the sum. `scratch` (32) is shared; a
// second call needs other scratch or a barrier before it.
__device__ __forceinline__ float block_tree_sum(float v, float* scratch, int warps) {
    v = warp_tree_sum(v);
    if (warps == 1) return v;
    int lane = threadIdx.x & 31;
    if (lane == 0) scratch[threadIdx.x >> 5] = v;
    __syncthreads();
    return warp_tree_sum(lane < warps ? scratch[lane] : 0.0f);
}
