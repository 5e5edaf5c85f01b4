// What gemm_decode.cu and gemm_portable.cu share: operands of mma.sync from swizzled shared memory, and the epilogues.
//
// Weights are the 16-row operand (a tile of common.cuh, "layouts"), 8 tokens the other. The canonical order: for each
// element of the result, k ascending, 16 at a time, one fp32 accumulator that starts at 0.
#pragma once
#include "math.cuh"

enum Epilogue { F32, ADD, SWIGLU };

// One 64-column step of a row tile and GROUPS groups of 8 tokens, in registers.
template <int GROUPS> struct Fragments {
    uint32_t w[4][4];          // 16 rows x 64 columns
    uint32_t x[GROUPS][2][4];  // 8 tokens x 64 columns each

    // Where this lane reads in a weight tile (2 KB) and in a box of tokens x 64 columns (128-byte rows), both swizzled and
    // 1024-byte aligned: ldmatrix takes the address of row lane % 8 of its matrix lane / 8.
    static __device__ __forceinline__ uint32_t w_offset(int lane) {
        const int row = lane & 7, matrix = lane >> 3;
        return (matrix & 1) * 1024 + row * 128 + (((matrix >> 1) ^ row) << 4);
    }
    static __device__ __forceinline__ uint32_t x_offset(int lane) {
        const int row = lane & 7, matrix = lane >> 3;
        return row * 128 + ((matrix ^ row) << 4);
    }
    __device__ __forceinline__ void load_w(uint32_t w_lane) {
#pragma unroll
        for (int k = 0; k < 4; k++) ptx::ldmatrix_x4(w[k], w_lane ^ (k << 5));
    }
    __device__ __forceinline__ void load_x(uint32_t x_lane) {
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int h = 0; h < 2; h++) ptx::ldmatrix_x4(x[group][h], (x_lane + group * 1024) ^ (h << 6));
    }
    __device__ __forceinline__ void multiply(float (&acc)[GROUPS][4]) const {
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
                ptx::mma_16816(acc[group], w[k], x[group][k >> 1][(k & 1) * 2], x[group][k >> 1][(k & 1) * 2 + 1]);
    }
};

// Where a warp's accumulators of one row tile belong: value j of group i is token `token` + 8 i + (j & 1), row
// `row` + 8 (j >> 1).
struct Place {
    int token, row, tile;
    __device__ __forceinline__ Place(int tile, int first_token, int lane)
        : token(first_token + (lane & 3) * 2), row(tile * 16 + (lane >> 2)), tile(tile) {}
    __device__ __forceinline__ bool inside(int group, int j, int M, int N) const {
        return token + group * 8 + (j & 1) < M && row + (j >> 1) * 8 < N;
    }
    __device__ __forceinline__ int64_t element(int group, int j, int ld_out) const {
        return (int64_t)(token + group * 8 + (j & 1)) * ld_out + row + (j >> 1) * 8;
    }
};

template <int GROUPS>
__device__ __forceinline__ void load_residual(float (&residual)[GROUPS][4], const float* out, const Place& place, int M, int N, int ld_out) {
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            residual[group][j] = place.inside(group, j, M, N) ? out[place.element(group, j, ld_out)] : 0.0f;
}

template <int EPILOGUE, int GROUPS>
__device__ __forceinline__ void store(const float (&acc)[GROUPS][4], const float (&residual)[GROUPS][4], void* out, const Place& place,
                                      int M, int N, int ld_out) {
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        if (EPILOGUE == SWIGLU) {  // rows 0..7 of a tile are gates, 8..15 their ups
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (place.inside(group, j, M, N))
                    ((bf16*)out)[place.element(group, j, ld_out) - place.tile * 8] = __float2bfloat16_rn(swiglu(acc[group][j], acc[group][j + 2]));
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (place.inside(group, j, M, N))
                    ((float*)out)[place.element(group, j, ld_out)] = EPILOGUE == ADD ? __fadd_rn(residual[group][j], acc[group][j]) : acc[group][j];
        }
    }
}
