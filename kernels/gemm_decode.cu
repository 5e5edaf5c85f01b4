// y = x W^T for the few token rows of a decode step (M <= 64): a stream of weights at the speed of HBM. Needs sm_90.
//
//   F32:    out[m][n] = acc                         out fp32 (M, ld_out)
//   ADD:    out[m][n] = out[m][n] + acc             out fp32 (M, ld_out), the residual stream
//   SWIGLU: out[m][j] = bf16(swiglu(gate, up))      out bf16 (M, ld_out); W is gate_up, 8 gate rows and their 8 up rows a tile
//   acc = sum over k ascending, 16 at a time, of x[m][k] W[n][k]: mma.sync m16n8k16, one fp32 accumulator, no split of K.
//   So the bits depend neither on M nor on anything below: not on the kernel variant, the teams, the stages or the block.
//
// x: bf16 (M, k_pad) through a TMA map with boxes of the variant's M rows x 64 columns (rows past M arrive as zeros).
// W: bf16 tiles (common.cuh, "layouts"); N rows, tiles of 16 padded with zeros. k_pad: a multiple of 64.
//
// A team (one warp; SPLIT warps where tokens are many) takes one row tile over the whole K: weights are mma's 16-row
// operand, tokens its 8 columns. It refills its own ring of pieces (PIECE tiles of 2 KB, contiguous in memory) by bulk
// copies: the slot it has just read is the slot it fills, so weights need no producer and no "empty" barrier. That
// matters: one producer thread issues a copy every 0.2 us, too few for 4 KB pieces (kernels/LOG.md). Warp 0 fills the
// ring of x pieces that all teams read. A block has a contiguous run of tiles, `teams` of them a pass.
//
// HBM must not idle between kernels. Weights never change in a step, so a team does not wait for the kernel before us to
// fill its ring, and asks L2 for `ahead` pieces more. It lets the next kernel begin when it has nothing left to ask for.
//
// With clusters, the blocks of a cluster read the same x: each fetches every n-th box of a piece into all of them.
//
// Launch: kernels/gemm.py. Grid (blocks, 1, 1), (1 + teams * SPLIT) * 32 threads, cluster 1, 2 or 4 along x.
// path: hopper
#include "gemm_core.cuh"

#if HAS_SM90

template <int EPILOGUE, int GROUPS, int SPLIT, int PIECE>
__device__ __forceinline__ void gemm_decode(const Common& common, const TensorMap& x_map, const bf16* w_tiled, void* out, int M, int N,
                                            int k_pad, int ld_out, int teams, int stages, int ahead) {
    constexpr int WARP_GROUPS = GROUPS / SPLIT;  // groups of 8 tokens a warp holds
    constexpr int W_PIECE = PIECE * 2048, X_BOX = GROUPS * 1024, X_PIECE = PIECE * X_BOX;  // bytes
    DYNAMIC_SHARED(smem);
    uint8_t* w_ring = smem;                                       // (teams, stages, W_PIECE)
    uint8_t* x_ring = w_ring + teams * stages * W_PIECE;          // (stages, X_PIECE)
    uint64_t* w_full = (uint64_t*)(x_ring + stages * X_PIECE);    // (teams, stages)
    uint64_t* x_full = w_full + teams * stages;                   // (stages)
    uint64_t* x_empty = x_full + stages;                          // (stages)

    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int cluster = ptx::cluster_size();
    const int k_tiles = k_pad >> 6, pieces = (k_tiles + PIECE - 1) / PIECE;  // of one row tile
    const int tiles = (N + 15) >> 4, base = tiles / gridDim.x, rest = tiles % gridDim.x;
    const int first = blockIdx.x * base + min((int)blockIdx.x, rest), end = first + base + ((int)blockIdx.x < rest);
    const int passes = (base + (rest > 0) + teams - 1) / teams;  // the same in all blocks: a cluster shares its x

    stamp_kernel(common);
    if (threadIdx.x == 0) {
        for (int i = 0; i < teams * stages; i++) ptx::mbarrier_init(w_full + i, 1);
        for (int i = 0; i < stages; i++) { ptx::mbarrier_init(x_full + i, 1); ptx::mbarrier_init(x_empty + i, teams * SPLIT * cluster); }
        ptx::mbarrier_fence_init();
    }
    __syncthreads();
    if (cluster > 1) ptx::cluster_arrive();  // our barriers are ready; weights need not know of the others'

    int slot = 0, parity = 0;  // of the piece at hand, in both rings
    auto next_slot = [&]() { if (++slot == stages) { slot = 0; parity ^= 1; } };
    if (warp == 0) {
        if (cluster > 1) ptx::cluster_wait();
        if (lane == 0) ptx::tma_prefetch_map(&x_map);
        ptx::wait_for_previous();
        const int rank = cluster > 1 ? ptx::cluster_rank() : 0;
        for (int pass = 0; pass < passes; pass++)
            for (int piece = 0; piece < pieces; piece++) {
                const int boxes = min(PIECE, k_tiles - piece * PIECE);
                if (lane == 0) {
                    ptx::mbarrier_wait(x_empty + slot, parity ^ 1);
                    ptx::mbarrier_arrive_expect(x_full + slot, boxes * X_BOX);
                }
                __syncwarp();
                if (lane < boxes && lane % cluster == rank) {
                    uint8_t* box = x_ring + slot * X_PIECE + lane * X_BOX;
                    const int column = (piece * PIECE + lane) * 64;
                    if (cluster > 1) ptx::tma_load_2d_multicast(box, &x_map, column, 0, x_full + slot, (1u << cluster) - 1);
                    else ptx::tma_load_2d(box, &x_map, column, 0, x_full + slot);
                }
                next_slot();
            }
    } else {
        const int team = (warp - 1) / SPLIT, part = (warp - 1) % SPLIT;
        const bool leader = part == 0 && lane == 0;
        uint8_t* ring = w_ring + team * stages * W_PIECE;
        uint64_t* full = w_full + team * stages;
        int load_tile = first + team, load_piece = 0;  // the next piece to ask for
        auto load = [&](int into) {
            if (load_tile >= end) return;
            if (leader) {
                const int bytes = min(PIECE, k_tiles - load_piece * PIECE) * 2048;
                ptx::mbarrier_arrive_expect(full + into, bytes);
                ptx::bulk_copy_once(ring + into * W_PIECE, w_tiled + ((int64_t)load_tile * k_tiles + load_piece * PIECE) * 1024, bytes, full + into);
            }
            if (++load_piece == pieces) { load_piece = 0; load_tile += teams; }
            if (load_tile >= end && leader) ptx::launch_dependents();
        };
        for (int i = 0; i < stages; i++) load(i);
        if (leader && load_tile < end && ahead > 0)
            ptx::bulk_prefetch_l2(w_tiled + ((int64_t)load_tile * k_tiles + load_piece * PIECE) * 1024, min(ahead * PIECE, k_tiles - load_piece * PIECE) * 2048);
        if (cluster > 1) ptx::cluster_wait();
        ptx::wait_for_previous();  // before we read or write `out`

        const uint32_t w_lane = ptx::shared_address(ring) + Fragments<WARP_GROUPS>::w_offset(lane);
        const uint32_t x_lane = ptx::shared_address(x_ring) + part * WARP_GROUPS * 1024 + Fragments<WARP_GROUPS>::x_offset(lane);
        auto x_left = [&](int from) {  // this warp has read the x piece
            if (cluster > 1) { if (lane < cluster) ptx::mbarrier_arrive_remote(x_empty + from, lane); }
            else if (lane == 0) ptx::mbarrier_arrive(x_empty + from);
        };
        auto leave = [&](int from) {
            if (SPLIT == 1) __syncwarp();
            else ptx::named_barrier(1 + team, SPLIT * 32);
            x_left(from);
            load(from);
        };
        auto wait_piece = [&]() {
            ptx::mbarrier_wait(full + slot, parity);
            ptx::mbarrier_wait(x_full + slot, parity);
        };
        for (int pass = 0; pass < passes; pass++) {
            const int tile = first + pass * teams + team;
            if (tile >= end) {  // only in the last pass
                for (int piece = 0; piece < pieces; piece++) {
                    ptx::mbarrier_wait(x_full + slot, parity);
                    __syncwarp();
                    x_left(slot);
                    next_slot();
                }
                break;
            }
            const Place place(tile, part * WARP_GROUPS * 8, lane);
            float acc[WARP_GROUPS][4] = {}, residual[WARP_GROUPS][4];
            if (EPILOGUE == ADD) load_residual(residual, (const float*)out, place, M, N, ld_out);  // early: here when the sum is
            // Two tiles' operands at a time: the loads of one overlap the mma chain of the other.
            Fragments<WARP_GROUPS> even, odd;
            wait_piece();
            even.load_w(w_lane + slot * W_PIECE);
            even.load_x(x_lane + slot * X_PIECE);
            int inside = 0;  // tile within the piece
            for (int t = 0; t + 2 <= k_tiles; t += 2) {
                const int at = slot;
                odd.load_w(w_lane + at * W_PIECE + (inside + 1) * 2048);
                odd.load_x(x_lane + at * X_PIECE + (inside + 1) * X_BOX);
                even.multiply(acc);
                const bool last = PIECE == 2 || inside + 2 == PIECE;  // of the piece
                inside = last ? 0 : inside + 2;
                if (last) next_slot();
                if (t + 2 < k_tiles) {
                    if (last) wait_piece();
                    even.load_w(w_lane + slot * W_PIECE + inside * 2048);
                    even.load_x(x_lane + slot * X_PIECE + inside * X_BOX);
                }
                odd.multiply(acc);
                if (last) leave(at);
            }
            if (k_tiles & 1) even.multiply(acc);
            if (k_tiles % PIECE) {
                leave(slot);
                next_slot();
            }
            store<EPILOGUE>(acc, residual, out, place, M, N, ld_out);
        }
    }
    if (cluster > 1) {  // nobody leaves while others may still signal here
        __syncwarp();
        ptx::cluster_sync();
    }
}

#define BODY(epilogue, m, split, piece) \
    gemm_decode<epilogue, m / 8, split, piece>(common, x_map, w_tiled, out, M, N, k_pad, ld_out, teams, stages, ahead);
#else
#define BODY(epilogue, m, split, piece)
#endif

#define KERNEL(name, epilogue, m, split, piece)                                                                                     \
    extern "C" __global__ void __launch_bounds__(288, 1) gemm_decode_##name##_m##m##_p##piece(                                      \
        const Common common, const __grid_constant__ TensorMap x_map, const bf16* __restrict__ w_tiled, void* out, int M, int N,   \
        int k_pad, int ld_out, int teams, int stages, int ahead) {                                                                  \
        BODY(epilogue, m, split, piece)                                                                                             \
    }
#define KERNELS(m, split, piece)         \
    KERNEL(f32, F32, m, split, piece)    \
    KERNEL(add, ADD, m, split, piece)    \
    KERNEL(swiglu, SWIGLU, m, split, piece)

KERNELS(8, 1, 2)
KERNELS(8, 1, 4)
KERNELS(16, 1, 2)
KERNELS(16, 1, 4)
KERNELS(32, 1, 2)
KERNELS(32, 1, 4)
KERNELS(64, 2, 2)
