// y = x W^T for the few token rows of a decode step (M <= 64): a stream of weights at the speed of HBM. Needs sm_90.
//
//   F32:    out[m][n] = acc                         out fp32 (M, ld_out)
//   ADD:    out[m][n] = out[m][n] + acc             out fp32 (M, ld_out), the residual stream
//   SWIGLU: out[m][j] = bf16(swiglu(gate, up))      out bf16 (M, ld_out); W is gate_up, 8 gate rows and their 8 up rows a tile
//   acc = sum over k ascending, 16 at a time, of x[m][k] W[n][k]: mma.sync m16n8k16, one fp32 accumulator, no split of K.
//   So the bits depend neither on M nor on anything below: not on the kernel variant, the lanes, the stages or the block.
//
// x: bf16 (M, k_pad) through a TMA map with boxes of the variant's M rows x 64 columns (rows past M arrive as zeros).
// W: bf16 tiles (common.cuh, "layouts"); N rows, tiles of 16 padded with zeros. k_pad: a multiple of 64.
//
// One block holds `lanes` row tiles at a time, each lane one warp (SPLIT warps where tokens are many) that takes its tile
// over the whole K: weights are mma's 16-row operand, tokens its 8 columns. Warp 0 fills the lanes' rings of pieces
// (PIECE_TILES tiles of 2 KB, contiguous in memory) by bulk copies, warp 1 the ring of x pieces. Blocks take contiguous
// runs of tiles, `lanes` a pass.
//
// HBM must not idle between kernels. Weights never change in a step, so warp 0 does not wait for the kernel before us: it
// fills its rings and, `lookahead` pieces further, asks for lines of L2. When that look-ahead has reached the end of the
// block's weights there is nothing left to ask for, and only then it lets the next kernel begin, whose warp 0 goes on.
//
// With clusters, the blocks of a cluster read the same x: each fetches every n-th tile of a piece into all of them.
//
// Launch: kernels/gemm.py. Grid (blocks, 1, 1), (2 + lanes * SPLIT) * 32 threads, cluster 1, 2 or 4 along x.
#include "gemm_core.cuh"

#if HAS_SM90

// A place in a ring of `stages`, and the parity of the barriers there.
struct Cursor {
    int slot = 0, parity = 0;
    __device__ __forceinline__ void advance(int stages) {
        if (++slot == stages) { slot = 0; parity ^= 1; }
    }
};

// The tiles of this block: a contiguous run, in passes of at most `lanes`; all blocks make the same number of passes.
struct Run {
    int first, count, passes;
    __device__ __forceinline__ Run(int tiles, int lanes) {
        int blocks = gridDim.x, block = blockIdx.x, base = tiles / blocks, rest = tiles % blocks;
        count = base + (block < rest);
        first = block * base + min(block, rest);
        passes = (base + (rest > 0) + lanes - 1) / lanes;
    }
    __device__ __forceinline__ int pass_count(int pass) const { return count / passes + (pass < count % passes); }
    __device__ __forceinline__ int pass_first(int pass) const { return first + pass * (count / passes) + min(pass, count % passes); }
};

template <int EPILOGUE, int GROUPS, int SPLIT, int PIECE_TILES>
__device__ __forceinline__ void gemm_decode(const Common& common, const TensorMap& x_map, const bf16* w_tiled, void* out, int M, int N,
                                            int k_pad, int ld_out, int lanes, int w_stages, int x_stages, int lookahead) {
    constexpr int WARP_GROUPS = GROUPS / SPLIT;               // groups of 8 tokens a warp holds
    constexpr int W_PIECE = PIECE_TILES * 2048;               // bytes
    constexpr int X_BOX = GROUPS * 1024, X_PIECE = PIECE_TILES * X_BOX;
    DYNAMIC_SHARED(smem);
    uint8_t* w_ring = smem;                                   // (lanes, w_stages, W_PIECE)
    uint8_t* x_ring = w_ring + lanes * w_stages * W_PIECE;    // (x_stages, X_PIECE)
    uint64_t* w_full = (uint64_t*)(x_ring + x_stages * X_PIECE);  // (lanes, w_stages)
    uint64_t* w_empty = w_full + lanes * w_stages;
    uint64_t* x_full = w_empty + lanes * w_stages;            // (x_stages)
    uint64_t* x_empty = x_full + x_stages;

    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int cluster = ptx::cluster_size();
    const int k_tiles = k_pad >> 6, pieces = (k_tiles + PIECE_TILES - 1) / PIECE_TILES;  // of one row tile
    const Run run((N + 15) >> 4, lanes);

    stamp_kernel(common);
#ifdef EXPERIMENT
    if (common.pad & 1) ptx::launch_dependents();
#endif
    if (threadIdx.x == 0) {
        for (int i = 0; i < lanes * w_stages; i++) { ptx::mbarrier_init(w_full + i, 1); ptx::mbarrier_init(w_empty + i, SPLIT); }
        for (int i = 0; i < x_stages; i++) { ptx::mbarrier_init(x_full + i, 1); ptx::mbarrier_init(x_empty + i, lanes * SPLIT * cluster); }
        ptx::mbarrier_fence_init();
    }
    __syncthreads();
    if (cluster > 1) ptx::cluster_arrive();  // our barriers are ready; warp 0 need not know of the others'

    if (warp == 0) {
        if (lane == 0) {
            const int total = run.passes * pieces;
            Cursor at;
            int ahead = w_stages, ahead_pass = w_stages / pieces, ahead_piece = w_stages % pieces;  // of the L2 look-ahead
            int loaded = 0;
            for (int pass = 0; pass < run.passes; pass++) {
                const int count = run.pass_count(pass);
                const bf16* w_pass = w_tiled + (int64_t)run.pass_first(pass) * k_tiles * 1024;
                for (int piece = 0; piece < pieces; piece++) {
                    const int bytes = min(PIECE_TILES, k_tiles - piece * PIECE_TILES) * 2048;
                    for (int c = 0; c < count; c++) {
                        const int i = c * w_stages + at.slot;
                        ptx::mbarrier_wait(w_empty + i, at.parity ^ 1);
                        ptx::mbarrier_arrive_expect(w_full + i, bytes);
#ifdef EXPERIMENT
                        if (common.pad & 2) ptx::bulk_copy(w_ring + i * W_PIECE, w_pass + ((int64_t)c * k_tiles + piece * PIECE_TILES) * 1024, bytes, w_full + i);
                        else
#endif
                        ptx::bulk_copy_once(w_ring + i * W_PIECE, w_pass + ((int64_t)c * k_tiles + piece * PIECE_TILES) * 1024, bytes, w_full + i);
                    }
                    at.advance(w_stages);
                    loaded++;
                    for (; loaded >= w_stages && ahead < min(loaded + lookahead, total); ahead++) {
                        const int ahead_count = run.pass_count(ahead_pass), ahead_bytes = min(PIECE_TILES, k_tiles - ahead_piece * PIECE_TILES) * 2048;
                        const bf16* w_ahead = w_tiled + ((int64_t)run.pass_first(ahead_pass) * k_tiles + ahead_piece * PIECE_TILES) * 1024;
                        for (int c = 0; c < ahead_count; c++) ptx::bulk_prefetch_l2(w_ahead + (int64_t)c * k_tiles * 1024, ahead_bytes);
                        if (++ahead_piece == pieces) { ahead_piece = 0; ahead_pass++; }
                    }
                    if (loaded == max(total - lookahead, min(w_stages, total))) ptx::launch_dependents();
                }
            }
        }
        __syncwarp();
        if (cluster > 1) ptx::cluster_wait();
    } else if (warp == 1) {
        if (cluster > 1) ptx::cluster_wait();
        if (lane == 0) {
            ptx::tma_prefetch_map(&x_map);
            ptx::wait_for_previous();
            const int rank = cluster > 1 ? ptx::cluster_rank() : 0;
            Cursor at;
            for (int pass = 0; pass < run.passes; pass++)
                for (int piece = 0; piece < pieces; piece++) {
                    const int tiles = min(PIECE_TILES, k_tiles - piece * PIECE_TILES);
                    ptx::mbarrier_wait(x_empty + at.slot, at.parity ^ 1);
                    ptx::mbarrier_arrive_expect(x_full + at.slot, tiles * X_BOX);
                    uint8_t* box = x_ring + at.slot * X_PIECE;
                    for (int t = rank; t < tiles; t += cluster) {
                        if (cluster > 1) ptx::tma_load_2d_multicast(box + t * X_BOX, &x_map, (piece * PIECE_TILES + t) * 64, 0, x_full + at.slot, (1u << cluster) - 1);
                        else ptx::tma_load_2d(box + t * X_BOX, &x_map, (piece * PIECE_TILES + t) * 64, 0, x_full + at.slot);
                    }
                    at.advance(x_stages);
                }
        }
        __syncwarp();
    } else {
        if (cluster > 1) ptx::cluster_wait();
        ptx::wait_for_previous();  // before we read or write `out`
        const int c = (warp - 2) / SPLIT, part = (warp - 2) % SPLIT;
        const uint32_t w_lane = ptx::shared_address(w_ring + c * w_stages * W_PIECE) + Fragments<WARP_GROUPS>::w_offset(lane);
        const uint32_t x_lane = ptx::shared_address(x_ring) + part * WARP_GROUPS * 1024 + Fragments<WARP_GROUPS>::x_offset(lane);
        Cursor w_at, x_at;
        for (int pass = 0; pass < run.passes; pass++) {
            const bool active = c < run.pass_count(pass);
            const Place place(run.pass_first(pass) + c, part * WARP_GROUPS * 8, lane);
            auto wait_piece = [&]() {
                ptx::mbarrier_wait(x_full + x_at.slot, x_at.parity);
                if (active) ptx::mbarrier_wait(w_full + c * w_stages + w_at.slot, w_at.parity);
            };
            auto release_piece = [&](int w_slot, int x_slot) {
                __syncwarp();
                if (active && lane == 0) ptx::mbarrier_arrive(w_empty + c * w_stages + w_slot);
                if (cluster > 1) { if (lane < cluster) ptx::mbarrier_arrive_remote(x_empty + x_slot, lane); }
                else if (lane == 0) ptx::mbarrier_arrive(x_empty + x_slot);
            };
            if (!active) {
                for (int piece = 0; piece < pieces; piece++) {
                    wait_piece();
                    release_piece(0, x_at.slot);
                    x_at.advance(x_stages);
                }
                continue;
            }
            float acc[WARP_GROUPS][4] = {}, residual[WARP_GROUPS][4];
            if (EPILOGUE == ADD) load_residual(residual, (const float*)out, place, M, N, ld_out);  // early: here when the sum is
            // Two steps' operands at a time: the loads of one overlap the mma chain of the other.
            Fragments<WARP_GROUPS> even, odd;
            wait_piece();
            even.load_w(w_lane + w_at.slot * W_PIECE);
            even.load_x(x_lane + x_at.slot * X_PIECE);
            int inside = 0;  // tile within the piece
            for (int t = 0; t + 2 <= k_tiles; t += 2) {
                const int w_slot = w_at.slot, x_slot = x_at.slot;
                odd.load_w(w_lane + w_slot * W_PIECE + (inside + 1) * 2048);
                odd.load_x(x_lane + x_slot * X_PIECE + (inside + 1) * X_BOX);
                even.multiply(acc);
                const bool end = PIECE_TILES == 2 || inside + 2 == PIECE_TILES;  // of the piece
                inside = end ? 0 : inside + 2;
                if (end) { w_at.advance(w_stages); x_at.advance(x_stages); }
                if (t + 2 < k_tiles) {
                    if (end) wait_piece();
                    even.load_w(w_lane + w_at.slot * W_PIECE + inside * 2048);
                    even.load_x(x_lane + x_at.slot * X_PIECE + inside * X_BOX);
                }
                odd.multiply(acc);
                if (end) release_piece(w_slot, x_slot);
            }
            if (k_tiles & 1) { even.multiply(acc); inside += 2; }
            if (inside) {
                release_piece(w_at.slot, x_at.slot);
                w_at.advance(w_stages);
                x_at.advance(x_stages);
            }
            store<EPILOGUE>(acc, residual, out, place, M, N, ld_out);
        }
    }
    if (cluster > 1) {  // nobody leaves while others may still signal here
        ptx::cluster_arrive();
        ptx::cluster_wait();
    }
}

#endif  // HAS_SM90

#ifndef PIECE_TILES_OF
#define PIECE_TILES_OF(m) 2
#endif
#if HAS_SM90
#define BODY(epilogue, m, split) \
    gemm_decode<epilogue, m / 8, split, PIECE_TILES_OF(m)>(common, x_map, w_tiled, out, M, N, k_pad, ld_out, lanes, w_stages, x_stages, lookahead);
#else
#define BODY(epilogue, m, split)
#endif
#define KERNEL(name, epilogue, m, split)                                                                                              \
    extern "C" __global__ void __launch_bounds__(320, 1) gemm_decode_##name##_m##m(                                                   \
        const Common common, const __grid_constant__ TensorMap x_map, const bf16* __restrict__ w_tiled, void* out, int M, int N,     \
        int k_pad, int ld_out, int lanes, int w_stages, int x_stages, int lookahead) {                                                \
        BODY(epilogue, m, split)                                                                                                      \
    }
#define KERNELS(m, split) KERNEL(f32, F32, m, split) KERNEL(add, ADD, m, split) KERNEL(swiglu, SWIGLU, m, split)

KERNELS(8, 1)
KERNELS(16, 1)
KERNELS(32, 1)
KERNELS(64, 2)
