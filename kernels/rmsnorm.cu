// out[r] = bf16((x[row] * inv) * weight), inv = 1 / sqrt(sum(x[row]^2) / H + eps). Zhang and Sennrich 2019, arXiv 1910.07467.
//
// x (any, H) fp32, the residual stream; weight (H,) fp32; out (T, ld_out) bf16, columns H.. zero; row = rows[r],
// or r where rows is null. The sum is the canonical tree (math.cuh) over H padded to a power of two, each step rounded:
// the bits depend on nothing but the row, not on T or the block size.
//
// One block a row; the weight, which no kernel writes, is loaded while the kernel before still runs. The two kernels of real
// models take H that are multiples of 8, so a thread's elements are all inside or all outside: with 32 warps on one
// multiprocessor, code that also had a path for any H took 1.38 us a row instead of 1.18 (H200, H 4096). Few rows are bound by
// latency: rmsnorm_few, 4 elements a thread; many by bandwidth: rmsnorm, 8 elements a thread, 16 bytes a store.
// rmsnorm_any takes every other H: four spans of 8 elements a thread.
// Launch: grid T. rmsnorm_few: H <= 4096, block H/4 rounded up to warps; rmsnorm: H <= 8192, block H/8 rounded up to warps;
// rmsnorm_any: H <= 32768, block 1024 (a power of two: a span is a subtree).
#include "math.cuh"

namespace {

// values = from[0..N-1], from aligned to 16 bytes; zeros if not `inside`.
template <int N> __device__ __forceinline__ void load(float (&values)[N], const float* from, bool inside) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (inside) v = *reinterpret_cast<const float4*>(from + i);
        values[i] = v.x, values[i + 1] = v.y, values[i + 2] = v.z, values[i + 3] = v.w;
    }
}

// The same one by one, for any alignment, from[index..index + N-1]; zeros from `size` on.
template <int N> __device__ __forceinline__ void load_any(float (&values)[N], const float* from, int index, int size) {
#pragma unroll
    for (int i = 0; i < N; i++) values[i] = index + i < size ? from[index + i] : 0.0f;
}

template <int N> __device__ __forceinline__ float square_sum(const float (&x)[N]) {
    float squares[N];
#pragma unroll
    for (int i = 0; i < N; i++) squares[i] = __fmul_rn(x[i], x[i]);
    return tree_sum(squares);
}

template <int N> __device__ __forceinline__ void store(bf16* out, const float (&x)[N], float inv, const float (&weight)[N]) {
    uint32_t words[N / 2];
#pragma unroll
    for (int i = 0; i < N; i += 2)
        words[i / 2] = pack_bf16(__fmul_rn(__fmul_rn(x[i], inv), weight[i]), __fmul_rn(__fmul_rn(x[i + 1], inv), weight[i + 1]));
    if constexpr (N == 8)
        *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
    else
        *reinterpret_cast<uint2*>(out) = make_uint2(words[0], words[1]);
}

__device__ __forceinline__ float inverse_root(float sum, int hidden, float eps) {
    return 1.0f / sqrtf(__fadd_rn(sum / (float)hidden, eps));
}

__device__ __forceinline__ int row_of(const int32_t* rows) { return rows == nullptr ? (int)blockIdx.x : rows[blockIdx.x]; }

template <int N>
__device__ __forceinline__ void normalise_row(const Common& common, const float* x, const float* weight, bf16* out, const int32_t* rows, int hidden, int ld_out, float eps) {
    __shared__ float scratch[32];
    begin_kernel(common);
    int index = threadIdx.x * N, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    bool inside = index < hidden;
    float values[N], weights[N];
    load(weights, weight + index, inside);
    ptx::wait_for_previous();
    load(values, x + (int64_t)row_of(rows) * hidden + index, inside);
    float sum = warp_tree_sum(square_sum(values));
    if (lane == 0) scratch[threadIdx.x >> 5] = sum;
    __syncthreads();
    float inv = inverse_root(warp_tree_sum(lane < warps ? scratch[lane] : 0.0f), hidden, eps);
    if (inside) store(out + (int64_t)blockIdx.x * ld_out + index, values, inv, weights);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(1024)
rmsnorm_few(const Common common, const float* x, const float* weight, bf16* out, const int32_t* rows, int hidden, int ld_out, float eps) {
    normalise_row<4>(common, x, weight, out, rows, hidden, ld_out, eps);
}

extern "C" __global__ void __launch_bounds__(1024)
rmsnorm(const Common common, const float* x, const float* weight, bf16* out, const int32_t* rows, int hidden, int ld_out, float eps) {
    normalise_row<8>(common, x, weight, out, rows, hidden, ld_out, eps);
}

extern "C" __global__ void __launch_bounds__(1024)
rmsnorm_any(const Common common, const float* x, const float* weight, bf16* out, const int32_t* rows, int hidden, int ld_out, float eps) {
    constexpr int SPANS = 4, N = 8;
    __shared__ float scratch[SPANS][32];
    begin_kernel(common);
    ptx::wait_for_previous();
    int index = threadIdx.x * N, span = blockDim.x * N;
    const float* row = x + (int64_t)row_of(rows) * hidden;
    float values[SPANS][N], sums[SPANS];
#pragma unroll
    for (int s = 0; s < SPANS; s++) load_any(values[s], row, index + s * span, hidden);
#pragma unroll
    for (int s = 0; s < SPANS; s++) sums[s] = block_tree_sum(square_sum(values[s]), scratch[s], blockDim.x / 32);
    float inv = inverse_root(tree_sum(sums), hidden, eps);
    bf16* out_row = out + (int64_t)blockIdx.x * ld_out;
#pragma unroll
    for (int s = 0; s < SPANS; s++) {
        int first = index + s * span;
        if (first >= hidden) break;
        float weights[N];
        load_any(weights, weight, first, hidden);
#pragma unroll
        for (int i = 0; i < N; i++)  // zeros beyond H, where 0 * inv would be NaN if the row is
            out_row[first + i] = __float2bfloat16_rn(first + i < hidden ? __fmul_rn(__fmul_rn(values[s][i], inv), weights[i]) : 0.0f);
    }
}
