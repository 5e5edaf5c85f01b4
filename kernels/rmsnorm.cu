// out[r] = bf16((x[row] * inv) * weight), inv = 1 / sqrt(sum(x[row]^2) / H + eps). Zhang and Sennrich 2019, arXiv 1910.07467.
//
// x (any, H) fp32, the residual stream; weight (H,) fp32; out (T, ld_out) bf16, its columns H.. stay zero; row = rows[r],
// or r where rows is null. The sum is the canonical tree (math.cuh) over H padded to a power of two, each step rounded:
// the bits depend on nothing but the row, not on T or the block size.
//
// One block a row. Thread t holds elements 8t..8t+7, two 16-byte loads and one 16-byte store; the weight, which no kernel
// writes, is loaded while the kernel before still runs. rmsnorm_wide does that for four spans of 8 x 1024 elements.
// Launch: grid T; rmsnorm: block H/8 rounded up to warps, H <= 8192; rmsnorm_wide: block 1024, H <= 32768.
#include "math.cuh"

namespace {

constexpr int PER_THREAD = 8;

// values[0..7] = from[index..index + 7], zeros from `size` on. `aligned`: every row starts at a multiple of 16 bytes.
__device__ __forceinline__ void load_8(float (&values)[PER_THREAD], const float* from, int index, int size, bool aligned) {
    if (aligned) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (index + 4 * half < size) v = *reinterpret_cast<const float4*>(from + index + 4 * half);
            values[4 * half] = v.x, values[4 * half + 1] = v.y, values[4 * half + 2] = v.z, values[4 * half + 3] = v.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) values[i] = index + i < size ? from[index + i] : 0.0f;
    }
}

__device__ __forceinline__ float square_sum(const float (&x)[PER_THREAD]) {
    float squares[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) squares[i] = __fmul_rn(x[i], x[i]);
    return tree_sum(squares);
}

// Columns size.. of the last eight are written as zeros: 0 * inv would be NaN in a row that is NaN.
__device__ __forceinline__ void store_8(bf16* out, int index, int size, const float (&x)[PER_THREAD], float inv, const float (&weight)[PER_THREAD]) {
    if (index >= size) return;
    float y[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) y[i] = index + i < size ? __fmul_rn(__fmul_rn(x[i], inv), weight[i]) : 0.0f;
    *reinterpret_cast<uint4*>(out + index) =
        make_uint4(pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]), pack_bf16(y[4], y[5]), pack_bf16(y[6], y[7]));
}

template <int SPANS>
__device__ __forceinline__ void normalise_row(const Common& common, const float* x, const float* weight, bf16* out, const int32_t* rows, int hidden, int ld_out, float eps) {
    __shared__ float scratch[SPANS][32];
    begin_kernel(common);
    bool aligned = hidden % 4 == 0;
    int index = threadIdx.x * PER_THREAD, span = blockDim.x * PER_THREAD;
    float values[SPANS][PER_THREAD], sums[SPANS], weights[PER_THREAD];
    load_8(weights, weight, index, hidden, aligned);
    ptx::wait_for_previous();
    const float* row = x + (int64_t)(rows == nullptr ? (int)blockIdx.x : rows[blockIdx.x]) * hidden;
#pragma unroll
    for (int s = 0; s < SPANS; s++) load_8(values[s], row, index + s * span, hidden, aligned);
#pragma unroll
    for (int s = 0; s < SPANS; s++) sums[s] = block_tree_sum(square_sum(values[s]), scratch[s], blockDim.x / 32);
    float inv = 1.0f / sqrtf(__fadd_rn(tree_sum(sums) / (float)hidden, eps));
    bf16* out_row = out + (int64_t)blockIdx.x * ld_out;
#pragma unroll
    for (int s = 0; s < SPANS; s++) {
        if (s > 0) load_8(weights, weight, index + s * span, hidden, aligned);
        store_8(out_row, index + s * span, hidden, values[s], inv, weights);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(1024, 2)
rmsnorm(const Common common, const float* x, const float* weight, bf16* out, const int32_t* rows, int hidden, int ld_out, float eps) {
    normalise_row<1>(common, x, weight, out, rows, hidden, ld_out, eps);
}

extern "C" __global__ void __launch_bounds__(1024)
rmsnorm_wide(const Common common, const float* x, const float* weight, bf16* out, const int32_t* rows, int hidden, int ld_out, float eps) {
    normalise_row<4>(common, x, weight, out, rows, hidden, ld_out, eps);
}
