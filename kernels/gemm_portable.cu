// y = x W^T, any M, on every architecture from sm_80 (cp.async, ldmatrix, mma.sync). On Hopper it is the cross-check of
// gemm_decode.cu and gemm_prefill.cu: the same epilogues, the same bits.
//
//   F32:    out[m][n] = acc                         out fp32 (M, ld_out)
//   ADD:    out[m][n] = out[m][n] + acc             out fp32 (M, ld_out), the residual stream
//   SWIGLU: out[m][j] = bf16(swiglu(gate, up))      out bf16 (M, ld_out); W is gate_up, 8 gate rows and their 8 up rows a tile
//   acc = sum over k ascending, 16 at a time, of x[m][k] W[n][k]: mma.sync m16n8k16, one fp32 accumulator, no split of K.
//
// x: bf16 (M, ld_x), columns up to k_pad readable. W: bf16 tiles (common.cuh, "layouts"); N rows, tiles of 16 padded with
// zeros. k_pad: a multiple of 64. x and W 16-byte aligned, ld_x a multiple of 8.
//
// A block makes ROW_TILES * 16 rows x TOKENS tokens: a ring of STAGES steps of 64 columns, one block barrier a step; 4 warps,
// each WARP_TILES row tiles x WARP_GROUPS groups of 8 tokens. Launch: kernels/gemm.py. Grid (token blocks, row blocks, 1), so
// that the blocks that share weights run together; 128 threads.
#include "gemm_core.cuh"

template <int EPILOGUE, int ROW_TILES, int TOKENS, int WARP_TILES, int STAGES>
__device__ __forceinline__ void gemm_portable(const bf16* __restrict__ x, int ld_x, const bf16* __restrict__ w_tiled, void* out, int M, int N,
                                              int k_pad, int ld_out) {
    constexpr int ROW_WARPS = ROW_TILES / WARP_TILES, TOKEN_WARPS = 4 / ROW_WARPS, WARP_GROUPS = TOKENS / 8 / TOKEN_WARPS;
    constexpr int W_BYTES = ROW_TILES * 2048, STAGE = W_BYTES + TOKENS * 128;
    static_assert(ROW_WARPS * TOKEN_WARPS == 4 && WARP_GROUPS * TOKEN_WARPS * 8 == TOKENS, "four warps share the block's product");
    DYNAMIC_SHARED(smem);
    const uint32_t ring = ptx::shared_address(smem);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int tiles = (N + 15) >> 4, steps = k_pad >> 6;
    const int first_tile = blockIdx.y * ROW_TILES, first_token = blockIdx.x * TOKENS;

    auto load_w = [&](int step) {  // a tile is a straight copy: it is swizzled in memory; tiles past the end are zeros
        const uint32_t stage = ring + (step % STAGES) * STAGE;
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
            const int tile = first_tile + i;
            const bf16* source = w_tiled + ((int64_t)min(tile, tiles - 1) * steps + step) * 1024 + threadIdx.x * 8;
            ptx::cp_async_16(stage + i * 2048 + threadIdx.x * 16, source, tile < tiles ? 16 : 0);
        }
    };
    auto load_x = [&](int step) {
        const uint32_t stage = ring + (step % STAGES) * STAGE + W_BYTES;
#pragma unroll
        for (int i = threadIdx.x; i < TOKENS * 8; i += 128) {
            const int row = i >> 3, chunk = i & 7, token = first_token + row;
            ptx::cp_async_16(stage + row * 128 + ((chunk ^ (row & 7)) << 4), x + (int64_t)min(token, M - 1) * ld_x + step * 64 + chunk * 8,
                             token < M ? 16 : 0);
        }
    };
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++)
        if (step < steps) load_w(step);
    ptx::wait_for_previous();
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) load_x(step);
        ptx::cp_async_commit();
    }

    const int warp_tile = warp % ROW_WARPS * WARP_TILES, warp_token = warp / ROW_WARPS * WARP_GROUPS * 8;
    const uint32_t w_lane = ring + warp_tile * 2048 + Fragments<WARP_GROUPS>::w_offset(lane);
    const uint32_t x_lane = ring + W_BYTES + warp_token * 128 + Fragments<WARP_GROUPS>::x_offset(lane);
    float acc[WARP_TILES][WARP_GROUPS][4] = {};
    for (int step = 0; step < steps; step++) {
        ptx::cp_async_wait<STAGES - 2>();
        __syncthreads();  // the step has landed for everybody, and everybody has left the stage that is filled next
        if (step + STAGES - 1 < steps) { load_w(step + STAGES - 1); load_x(step + STAGES - 1); }
        ptx::cp_async_commit();
        const uint32_t stage = (step % STAGES) * STAGE;
        Fragments<WARP_GROUPS> operands;
        operands.load_x(x_lane + stage);
#pragma unroll
        for (int i = 0; i < WARP_TILES; i++) {
            operands.load_w(w_lane + stage + i * 2048);
            operands.multiply(acc[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < WARP_TILES; i++) {
        const Place place(first_tile + warp_tile + i, first_token + warp_token, lane);
        float residual[WARP_GROUPS][4];
        if (EPILOGUE == ADD) load_residual(residual, (const float*)out, place, M, N, ld_out);
        store<EPILOGUE>(acc[i], residual, out, place, M, N, ld_out);
    }
}

// m16: 64 rows x 16 tokens, 6 stages of 10 KB. m64: 64 rows x 64 tokens, 4 stages of 16 KB.
#define KERNEL(name, epilogue, tokens, warp_tiles, stages)                                                                     \
    extern "C" __global__ void __launch_bounds__(128) gemm_portable_##name##_m##tokens(                                         \
        const Common common, const bf16* __restrict__ x, int ld_x, const bf16* __restrict__ w_tiled, void* out, int M, int N,   \
        int k_pad, int ld_out) {                                                                                                \
        begin_kernel(common);                                                                                                   \
        gemm_portable<epilogue, 4, tokens, warp_tiles, stages>(x, ld_x, w_tiled, out, M, N, k_pad, ld_out);                     \
    }
#define KERNELS(tokens, warp_tiles, stages)        \
    KERNEL(f32, F32, tokens, warp_tiles, stages)   \
    KERNEL(add, ADD, tokens, warp_tiles, stages)   \
    KERNEL(swiglu, SWIGLU, tokens, warp_tiles, stages)

KERNELS(16, 1, 6)
KERNELS(64, 2, 4)
