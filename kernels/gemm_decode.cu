// y = x W^T for the few token rows of a decode step (M <= 64): a stream of weights at the speed of HBM. Needs sm_90.
//
//   F32:    out[m][n] = acc                         out fp32 (M, ld_out)
//   ADD:    out[m][n] = out[m][n] + acc             out fp32 (M, ld_out), the residual stream
//   SWIGLU: out[m][j] = bf16(swiglu(gate, up))      out bf16 (M, ld_out); W is gate_up, 8 gate rows and their 8 up rows a tile
//   acc = sum over k ascending, 16 at a time, of x[m][k] W[n][k]: mma.sync m16n8k16, one fp32 accumulator, no split of K.
//   So the bits depend neither on M nor on anything below: not on the variant, the teams, the stages or the block.
//
// x: bf16 (M, k_pad) through a TMA map with boxes of the variant's M rows x 64 columns (rows past M arrive as zeros).
// W: bf16 tiles (common.cuh, "layouts"); N rows, tiles of 16 padded with zeros. k_pad: a multiple of 64.
//
// A team (one warp; SPLIT warps with a share of the tokens each where tokens are many) takes one row tile over the whole K:
// weights are mma's 16-row operand, tokens its 8 columns. A block has `teams` of them and one ring of `stages` stages; a
// stage holds TILES tiles (64 columns each) of x and of every team's weights. Two warps fetch weights (a row tile's K is
// contiguous: one bulk copy a team and stage), two fetch x. Blocks take contiguous runs of row tiles, `teams` a pass.
//
// HBM must not idle between kernels. Weights never change in a step, so the warps that fetch them do not wait for the kernel
// before us: the rings are full when x is ready.
//
// A lone warp gets an instruction through every 4 cycles or so: hence the short loops, everything hoisted out of them.
// Rings large enough that a multiprocessor holds one block only: with room for two, some get two of the next kernel's.
//
// Launch: kernels/gemm.py. Grid (blocks, 1, 1), (4 + teams * SPLIT) * 32 threads.
// path: hopper
#include "gemm_core.cuh"

#if HAS_SM90

// The tiles of this block: a contiguous run, in passes of at most `teams`; all blocks make the same number of passes.
struct Run {
    int first, count, passes;
    __device__ __forceinline__ Run(int tiles, int teams) {
        const int blocks = gridDim.x, block = blockIdx.x, base = tiles / blocks, rest = tiles % blocks;
        count = base + (block < rest);
        first = block * base + min(block, rest);
        passes = (base + (rest > 0) + teams - 1) / teams;
    }
    __device__ __forceinline__ int pass_count(int pass) const { return count / passes + (pass < count % passes); }
    __device__ __forceinline__ int pass_first(int pass) const { return first + pass * (count / passes) + min(pass, count % passes); }
};

constexpr int PRODUCERS = 2;  // warps that fetch weights, and as many that fetch x: each every second stage

// A stage of the ring, and the parity of its barriers in this round.
struct Cursor {
    int slot, parity = 0;
    __device__ __forceinline__ explicit Cursor(int slot) : slot(slot) {}
    __device__ __forceinline__ void advance(int by, int stages) {
        slot += by;
        if (slot >= stages) { slot -= stages; parity ^= 1; }
    }
};

template <int EPILOGUE, int GROUPS, int SPLIT, int TILES>
__device__ __forceinline__ void gemm_decode(const Common& common, const TensorMap& x_map, const bf16* w_tiled, void* out, int M, int N,
                                            int k_pad, int ld_out, int teams, int stages) {
    constexpr int WARP_GROUPS = GROUPS / SPLIT, W_PIECE = TILES * 2048, X_BOX = GROUPS * 1024, X_PIECE = TILES * X_BOX;
    DYNAMIC_SHARED(smem);
    const int stage_bytes = X_PIECE + teams * W_PIECE;  // x, then each team's weights
    uint64_t* full = (uint64_t*)(smem + stages * stage_bytes);
    uint64_t* empty = full + stages;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int k_tiles = k_pad >> 6, pieces = (k_tiles + TILES - 1) / TILES;  // of one row tile
    const Run run((N + 15) >> 4, teams);

    begin_kernel(common);
    if (threadIdx.x < stages) {
        ptx::mbarrier_init(full + threadIdx.x, 2);
        ptx::mbarrier_init(empty + threadIdx.x, teams * SPLIT * WARP_ARRIVALS);
        ptx::mbarrier_fence_init();
    }
    __syncthreads();
    if (warp < PRODUCERS) {
        if (lane == 0) {
            const int total = run.passes * pieces;
            Cursor at(warp);
            int pass = 0, piece = warp;
            for (int stage = warp; stage < total; stage += PRODUCERS) {
                while (piece >= pieces) { piece -= pieces; pass++; }
                const int count = run.pass_count(pass), bytes = min(TILES, k_tiles - piece * TILES) * 2048;
                const uint8_t* source = (const uint8_t*)(w_tiled + ((int64_t)run.pass_first(pass) * k_tiles + piece * TILES) * 1024);
                uint8_t* target = smem + at.slot * stage_bytes + X_PIECE;
                ptx::mbarrier_wait(empty + at.slot, at.parity ^ 1);
                ptx::mbarrier_arrive_expect(full + at.slot, count * bytes);
                for (int c = 0; c < count; c++) {
                    ptx::bulk_copy_once(target, source, bytes, full + at.slot);
                    target += W_PIECE;
                    source += (int64_t)k_tiles * 2048;
                }
                at.advance(PRODUCERS, stages);
                piece += PRODUCERS;
            }
        }
    } else if (warp < 2 * PRODUCERS) {
        if (lane == 0) {
            ptx::tma_prefetch_map(&x_map);
            ptx::wait_for_previous();
            const int total = run.passes * pieces;
            Cursor at(warp - PRODUCERS);
            int piece = warp - PRODUCERS;
            for (int stage = piece; stage < total; stage += PRODUCERS) {
                while (piece >= pieces) piece -= pieces;
                const int tiles = min(TILES, k_tiles - piece * TILES);
                uint8_t* target = smem + at.slot * stage_bytes;
                ptx::mbarrier_wait(empty + at.slot, at.parity ^ 1);
                ptx::mbarrier_arrive_expect(full + at.slot, tiles * X_BOX);
                for (int t = 0; t < tiles; t++) ptx::tma_load_2d(target + t * X_BOX, &x_map, (piece * TILES + t) * 64, 0, full + at.slot);
                at.advance(PRODUCERS, stages);
                piece += PRODUCERS;
            }
        }
    } else {
        ptx::wait_for_previous();  // before we read or write `out`
        const int team = (warp - 2 * PRODUCERS) / SPLIT, part = (warp - 2 * PRODUCERS) % SPLIT;
        const uint32_t base = ptx::shared_address(smem);
        const uint32_t w_lane = base + X_PIECE + team * W_PIECE + Fragments<WARP_GROUPS>::w_offset(lane);
        const uint32_t x_lane = base + part * WARP_GROUPS * 1024 + Fragments<WARP_GROUPS>::x_offset(lane);
        const int whole = k_tiles / TILES, rest = k_tiles % TILES;
        Cursor at(0);
        for (int pass = 0; pass < run.passes; pass++) {
            if (team >= run.pass_count(pass)) {
                for (int piece = 0; piece < pieces; piece++) {
                    ptx::mbarrier_wait(full + at.slot, at.parity);
                    warp_arrive(empty + at.slot, lane);
                    at.advance(1, stages);
                }
                continue;
            }
            const Place place(run.pass_first(pass) + team, part * WARP_GROUPS * 8, lane);
            float acc[WARP_GROUPS][4] = {}, residual[WARP_GROUPS][4];
            if (EPILOGUE == ADD && WARP_GROUPS <= 2) load_residual(residual, (const float*)out, place, M, N, ld_out);  // early: here when the sum is
            Fragments<WARP_GROUPS> operands[2];  // the loads of one tile overlap the mma chain of the other
            ptx::mbarrier_wait(full + at.slot, at.parity);
            if (whole > 0) {
                operands[0].load_w(w_lane + at.slot * stage_bytes);
                operands[0].load_x(x_lane + at.slot * stage_bytes);
            }
            for (int piece = 0; piece < whole; piece++) {
                const uint32_t offset = at.slot * stage_bytes;
                uint64_t* leave = empty + at.slot;
#pragma unroll
                for (int t = 0; t < TILES - 1; t++) {
                    operands[(t + 1) & 1].load_w(w_lane + offset + (t + 1) * 2048);
                    operands[(t + 1) & 1].load_x(x_lane + offset + (t + 1) * X_BOX);
                    operands[t & 1].multiply(acc);
                }
                at.advance(1, stages);
                if (piece + 1 < whole) {
                    ptx::mbarrier_wait(full + at.slot, at.parity);
                    operands[0].load_w(w_lane + at.slot * stage_bytes);
                    operands[0].load_x(x_lane + at.slot * stage_bytes);
                }
                operands[(TILES - 1) & 1].multiply(acc);
                warp_release<WARP_GROUPS>(leave, acc[0], common.zero, lane);
            }
            if (rest > 0) {
                if (whole > 0) ptx::mbarrier_wait(full + at.slot, at.parity);
                for (int t = 0; t < rest; t++) {
                    operands[0].load_w(w_lane + at.slot * stage_bytes + t * 2048);
                    operands[0].load_x(x_lane + at.slot * stage_bytes + t * X_BOX);
                    operands[0].multiply(acc);
                }
                warp_release<WARP_GROUPS>(empty + at.slot, acc[0], common.zero, lane);
                at.advance(1, stages);
            }
            if (EPILOGUE == ADD && WARP_GROUPS > 2) load_residual(residual, (const float*)out, place, M, N, ld_out);
            store<EPILOGUE>(acc, residual, out, place, M, N, ld_out);
        }
    }
}

#endif  // HAS_SM90

#if HAS_SM90
#define BODY(epilogue, m, split, tiles) gemm_decode<epilogue, m / 8, split, tiles>(common, x_map, w_tiled, out, M, N, k_pad, ld_out, teams, stages);
#else
#define BODY(epilogue, m, split, tiles)
#endif
#define KERNEL(name, epilogue, m, split, tiles)                                                                               \
    extern "C" __global__ void __launch_bounds__(384, 1) gemm_decode_##name##_m##m##_t##tiles(                                 \
        const Common common, const __grid_constant__ TensorMap x_map, const bf16* w_tiled, void* out, int M, int N, int k_pad, \
        int ld_out, int teams, int stages) {                                                                                   \
        BODY(epilogue, m, split, tiles)                                                                                        \
    }
#define KERNELS(m, split, tiles)        \
    KERNEL(f32, F32, m, split, tiles)   \
    KERNEL(add, ADD, m, split, tiles)   \
    KERNEL(swiglu, SWIGLU, m, split, tiles)

// t4: few teams a block. t2: many.
KERNELS(8, 1, 4)
KERNELS(8, 1, 2)
KERNELS(16, 1, 4)
KERNELS(16, 1, 2)
KERNELS(32, 2, 4)
KERNELS(32, 1, 2)
KERNELS(64, 2, 2)
