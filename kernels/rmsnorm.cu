// out[r] = bf16((x[row] * inv) * weight), inv = 1 / sqrt(sum(x[row]^2) / H + eps). Zhang and Sennrich 2019, arXiv 1910.07467.
//
// x (any, H) fp32, the residual stream; weight (H,) fp32; out (T, ld_out) bf16, its columns H.. stay zero; row = rows[r],
// or r where rows is null. The sum is the canonical tree (math.cuh) over H padded to a power of two, each step rounded:
// the bits depend on nothing but the row, not on T or the block size.
//
// One block a row. A thread holds PER_THREAD neighbours and loads and stores 16 (or 8) bytes at a time; the weight, which no
// kernel writes, is loaded while the kernel before still runs. Few rows are bound by latency: rmsnorm_few, 4 elements a
// thread, 1.18 us instead of 1.36 on an H200; many rows by bandwidth: rmsnorm, 8 a thread. rmsnorm_wide: four spans of 8,192.
// Launch: grid T, block H / PER_THREAD rounded up to warps. rmsnorm_few: H <= 4096; rmsnorm: H <= 8192; rmsnorm_wide: block
// 1024, H <= 32768.
#include "math.cuh"

namespace {

// values[0..N-1] = from[index..], zeros from `size` on. `aligned`: every row starts at a multiple of 16 bytes.
template <int N> __device__ __forceinline__ void load(float (&values)[N], const float* from, int index, int size, bool aligned) {
    if (aligned) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (index + i < size) v = *reinterpret_cast<const float4*>(from + index + i);
            values[i] = v.x, values[i + 1] = v.y, values[i + 2] = v.z, values[i + 3] = v.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) values[i] = index + i < size ? from[index + i] : 0.0f;
    }
}

template <int N> __device__ __forceinline__ float square_sum(const float (&x)[N]) {
    float squares[N];
#pragma unroll
    for (int i = 0; i < N; i++) squares[i] = __fmul_rn(x[i], x[i]);
    return tree_sum(squares);
}

// Columns size.. of the last eight are written as zeros: 0 * inv would be NaN in a row that is NaN.
template <int N> __device__ __forceinline__ void store(bf16* out, int index, int size, const float (&x)[N], float inv, const float (&weight)[N]) {
    if (index >= (size + 7) / 8 * 8) return;
    uint32_t words[N / 2];
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        float low = index + i < size ? __fmul_rn(__fmul_rn(x[i], inv), weight[i]) : 0.0f;
        float high = index + i + 1 < size ? __fmul_rn(__fmul_rn(x[i + 1], inv), weight[i + 1]) : 0.0f;
        words[i / 2] = pack_bf16(low, high);
    }
    if constexpr (N == 8)
        *reinterpret_cast<uint4*>(out + index) = make_uint4(words[0], words[1], words[2], words[3]);
    else
        *reinterpret_cast<uint2*>(out + index) = make_uint2(words[0], words[1]);
}

template <int N, int SPANS>
__device__ __forceinline__ void normalise_row(const Common& common, const float* x, const float* weight, bf16* out, const int32_t* rows, int hidden, int ld_out, float eps) {
    __shared__ float scratch[SPANS][32];
    begin_kernel(common);
    bool aligned = hidden % 4 == 0;
    int index = threadIdx.x * N, span = blockDim.x * N;
    float values[SPANS][N], sums[SPANS], weights[N];
    load(weights, weight, index, hidden, aligned);
    ptx::wait_for_previous();
    const float* row = x + (int64_t)(rows == nullptr ? (int)blockIdx.x : rows[blockIdx.x]) * hidden;
#pragma unroll
    for (int s = 0; s < SPANS; s++) load(values[s], row, index + s * span, hidden, aligned);
#pragma unroll
    for (int s = 0; s < SPANS; s++) sums[s] = block_tree_sum(square_sum(values[s]), scratch[s], blockDim.x / 32);
    float inv = 1.0f / sqrtf(__fadd_rn(tree_sum(sums) / (float)hidden, eps));
    bf16* out_row = out + (int64_t)blockIdx.x * ld_out;
#pragma unroll
    for (int s = 0; s < SPANS; s++) {
        if (s > 0) load(weights, weight, index + s * span, hidden, aligned);
        store(out_row, index + s * span, hidden, values[s], inv, weights);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(1024)
rmsnorm_few(const Common common, const float* x, const float* weight, bf16* out, const int32_t* rows, int hidden, int ld_out, float eps) {
    normalise_row<4, 1>(common, x, weight, out, rows, hidden, ld_out, eps);
}

extern "C" __global__ void __launch_bounds__(1024)
rmsnorm(const Common common, const float* x, const float* weight, bf16* out, const int32_t* rows, int hidden, int ld_out, float eps) {
    normalise_row<8, 1>(common, x, weight, out, rows, hidden, ld_out, eps);
}

extern "C" __global__ void __launch_bounds__(1024)
rmsnorm_wide(const Common common, const float* x, const float* weight, bf16* out, const int32_t* rows, int hidden, int ld_out, float eps) {
    normalise_row<8, 4>(common, x, weight, out, rows, hidden, ld_out, eps);
}
