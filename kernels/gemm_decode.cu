// y = x W^T for the few token rows of a decode step (M <= 64): a stream of weights at the speed of HBM. sm_80 and later;
// tuned for sm_90.
//
//   F32:    out[m][n] = acc                         out fp32 (M, ld_out)
//   ADD:    out[m][n] = out[m][n] + acc             out fp32 (M, ld_out), the residual stream
//   SWIGLU: out[m][j] = bf16(swiglu(gate, up))      out bf16 (M, ld_out); W is gate_up, 8 gate rows and their 8 up rows a tile
//   acc = sum over k ascending, 16 at a time, of x[m][k] W[n][k]: mma.sync m16n8k16, one fp32 accumulator, no split of K.
//   So the bits depend neither on M nor on anything below: not on the kernel variant, the teams or the block.
//
// x: bf16 (M, ld_x). W: bf16 tiles (common.cuh, "layouts"); N rows, tiles of 16 padded with zeros. k_pad: a multiple of 64.
//
// A team of SPLIT warps takes one row tile over the whole K, weights as mma's 16-row operand, tokens as its 8 columns (with
// SPLIT 2 each warp has half of the tokens). The team copies its own weights, a contiguous run of memory, through a ring of
// STAGES stages of two tiles (4 KB): no warp waits for another to stream. x is copied by the whole block in chunks of
// CHUNK stages; one block barrier a chunk. Blocks take contiguous runs of tiles, `teams` tiles a pass.
//
// HBM must not idle between kernels. Weights never change in a step, so a block does not wait for the kernel before it to
// fill its rings and to ask L2 for `ahead` further stages. It lets the next kernel begin when it has itself nothing left to
// ask for (not at its start: then the next one's requests would be spent too early to bridge the gap between the two).
//
// Launch: kernels/gemm.py. Grid (blocks, 1, 1), teams * SPLIT * 32 threads.
#include "gemm_core.cuh"

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

// Weights of one team, stage by stage: through its passes, two tiles a stage.
struct WeightCursor {
    const bf16* tile = nullptr;  // start of the row tile; null: this team has none in this pass
    int pass = -1, step = 0;     // step: stage within the pass
    __device__ __forceinline__ void enter(int pass_, const Run& run, int team, const bf16* w_tiled, int k_tiles) {
        pass = pass_;
        step = 0;
        tile = pass < run.passes && team < run.pass_count(pass) ? w_tiled + (int64_t)(run.pass_first(pass) + team) * k_tiles * 1024 : nullptr;
    }
};

template <int EPILOGUE, int GROUPS, int SPLIT, int STAGES, int CHUNK, bool PIPELINED>
__device__ __forceinline__ void gemm_decode(const Common& common, const bf16* __restrict__ x, int ld_x, const bf16* __restrict__ w_tiled,
                                            void* out, int M, int N, int k_pad, int ld_out, int teams, int ahead) {
    constexpr int WARP_GROUPS = GROUPS / SPLIT, TEAM_THREADS = SPLIT * 32;
    constexpr int W_STAGE = 4096, X_BOX = GROUPS * 1024, X_STAGE = 2 * X_BOX;  // bytes
    constexpr int CHUNKS = (STAGES - 1 + CHUNK - 1) / CHUNK + 1;               // of x in shared memory: see load_x
    DYNAMIC_SHARED(smem);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, team = warp / SPLIT, part = warp % SPLIT;
    const int team_thread = part * 32 + lane;
    const uint32_t x_ring = ptx::shared_address(smem), w_ring = x_ring + CHUNKS * CHUNK * X_STAGE + team * STAGES * W_STAGE;
    const int k_tiles = k_pad >> 6, steps = (k_tiles + 1) >> 1;  // stages a pass
    const Run run((N + 15) >> 4, teams);
    const int total = run.passes * steps;

    stamp_kernel(common);
#ifdef EXPERIMENT
    if (common.pad & 1) ptx::launch_dependents();
#endif
    auto team_sync = [&]() {
        if (SPLIT == 1) __syncwarp();
        else ptx::named_barrier(1 + team, TEAM_THREADS);
    };
    auto advance = [&](WeightCursor& at) {
        if (++at.step == steps) at.enter(at.pass + 1, run, team, w_tiled, k_tiles);
    };
    auto stage_bytes = [&](int step) { return min(2, k_tiles - step * 2) * 2048; };
    WeightCursor load, prefetch;
    load.enter(0, run, team, w_tiled, k_tiles);
    int w_slot = 0;  // that is filled next
    auto load_w = [&]() {
        if (load.tile != nullptr) {
            const int bytes = stage_bytes(load.step);
            const uint8_t* source = (const uint8_t*)(load.tile + load.step * 2048) + team_thread * 16;
            const uint32_t target = w_ring + w_slot * W_STAGE + team_thread * 16;
#pragma unroll
            for (int i = 0; i < W_STAGE; i += TEAM_THREADS * 16)
                if (i < bytes) ptx::cp_async_16(target + i, source + i);
        }
        advance(load);
        if (++w_slot == STAGES) w_slot = 0;
    };
    // x of CHUNK stages from stage `stage` on (a multiple of CHUNK, in the pass's step `step`), rows below M. It takes the
    // place of the chunk CHUNKS before it, which every warp has left: it is asked for STAGES stages ahead.
    auto load_x = [&](int stage, int step) {
        const uint32_t chunk = x_ring + stage / CHUNK % CHUNKS * CHUNK * X_STAGE;
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            if (stage + i >= total) break;
            for (int unit = threadIdx.x; unit < X_STAGE / 16; unit += blockDim.x) {
                const int tile = unit / (X_BOX / 16), row = unit / 8 % (GROUPS * 8), column = unit & 7;
                if (row < M && step * 2 + tile < k_tiles)
                    ptx::cp_async_16(chunk + i * X_STAGE + tile * X_BOX + row * 128 + ((column ^ (row & 7)) << 4),
                                     x + (int64_t)row * ld_x + (step * 2 + tile) * 64 + column * 8);
            }
            if (++step == steps) step = 0;
        }
    };
    // ---- what may happen while the kernel before us still runs: weights only
    for (int i = 0; i < STAGES; i++) {
        load_w();
        ptx::cp_async_commit();
    }
    prefetch = load;
#if HAS_SM90
    if (ahead > 0 && team_thread == 0 && prefetch.tile != nullptr)  // to the end of the pass at most
        ptx::bulk_prefetch_l2(prefetch.tile + prefetch.step * 2048, min(ahead * 2, k_tiles - prefetch.step * 2) * 2048);
    for (int i = 0; i < ahead; i++) advance(prefetch);
#endif
    for (int unit = threadIdx.x; unit < CHUNKS * CHUNK * X_STAGE / 16; unit += blockDim.x)  // rows past M: zeros, once
        if (unit / 8 % (GROUPS * 8) >= M) ((uint4*)smem)[unit] = make_uint4(0, 0, 0, 0);
    // ---- from here on we depend on it
    ptx::wait_for_previous();
#pragma unroll
    for (int stage = 0; stage < STAGES; stage += CHUNK)
        if (stage < total) load_x(stage, stage % steps);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();

    const uint32_t w_lane = w_ring + Fragments<WARP_GROUPS>::w_offset(lane);
    const uint32_t x_lane = x_ring + part * WARP_GROUPS * 1024 + Fragments<WARP_GROUPS>::x_offset(lane);
    const int let_next_begin = max(0, total - STAGES - ahead);
    Fragments<WARP_GROUPS> even, odd;  // two tiles' operands: the loads of one overlap the mma chain of the other
    float acc[WARP_GROUPS][4] = {}, residual[WARP_GROUPS][4];
    int pass = 0, step = 0, w_at = 0, x_at = 0;  // of the stage being multiplied; slots in the rings
    bool active = team < run.pass_count(0);
    if (active) {
        if (EPILOGUE == ADD) load_residual(residual, (const float*)out, Place(run.pass_first(0) + team, part * WARP_GROUPS * 8, lane), M, N, ld_out);
        if (PIPELINED) { even.load_w(w_lane); even.load_x(x_lane); }
    }
    for (int stage = 0; stage < total; stage++) {
        const bool two = step * 2 + 1 < k_tiles, last = step + 1 == steps;
        const uint32_t w_now = w_lane + w_at * W_STAGE, x_now = x_lane + x_at * X_STAGE;
        if (active) {
            if (PIPELINED) {
                if (two) { odd.load_w(w_now + 2048); odd.load_x(x_now + X_BOX); }
                even.multiply(acc);
            } else {
                even.load_w(w_now);
                even.load_x(x_now);
                even.multiply(acc);
                if (two) {
                    even.load_w(w_now + 2048);
                    even.load_x(x_now + X_BOX);
                    even.multiply(acc);
                }
            }
        }
        if (++w_at == STAGES) w_at = 0;
        if (++x_at == CHUNKS * CHUNK) x_at = 0;
        ptx::cp_async_wait<STAGES - 2>();
        if (x_at % CHUNK == 0) __syncthreads();
        else team_sync();
        const bool next_active = last ? pass + 1 < run.passes && team < run.pass_count(pass + 1) : active;
        if (PIPELINED && next_active) { even.load_w(w_lane + w_at * W_STAGE); even.load_x(x_lane + x_at * X_STAGE); }
        {  // the stage just left is free: everybody's operands of it are in registers
            const int loaded = stage + STAGES;
            if (loaded % CHUNK == 0 && loaded < total) load_x(loaded, load.step);
            load_w();
            ptx::cp_async_commit();
#if HAS_SM90
            if (ahead > 0) {
                if (team_thread == 0 && prefetch.tile != nullptr) ptx::bulk_prefetch_l2(prefetch.tile + prefetch.step * 2048, stage_bytes(prefetch.step));
                advance(prefetch);
            }
#endif
            if (stage == let_next_begin) ptx::launch_dependents();
        }
        if (PIPELINED && active && two) odd.multiply(acc);
        step++;
        if (last) {
            if (active) store<EPILOGUE>(acc, residual, out, Place(run.pass_first(pass) + team, part * WARP_GROUPS * 8, lane), M, N, ld_out);
            pass++;
            step = 0;
            active = next_active;
#pragma unroll
            for (int group = 0; group < WARP_GROUPS; group++)
#pragma unroll
                for (int j = 0; j < 4; j++) acc[group][j] = 0.0f;
            if (EPILOGUE == ADD && active)
                load_residual(residual, (const float*)out, Place(run.pass_first(pass) + team, part * WARP_GROUPS * 8, lane), M, N, ld_out);
        }
    }
}

// _s8, _s6, _s4: few teams a block, deep rings. _s3: up to 8 teams.
#define KERNEL(name, epilogue, m, split, stages, chunk, pipelined)                                                                \
    extern "C" __global__ void __launch_bounds__(256) gemm_decode_##name##_m##m##_s##stages(                                       \
        const Common common, const bf16* __restrict__ x, int ld_x, const bf16* __restrict__ w_tiled, void* out, int M, int N,      \
        int k_pad, int ld_out, int teams, int ahead) {                                                                             \
        gemm_decode<epilogue, m / 8, split, stages, chunk, pipelined>(common, x, ld_x, w_tiled, out, M, N, k_pad, ld_out, teams, ahead); \
    }
#define KERNELS(m, split, stages, chunk, pipelined)        \
    KERNEL(f32, F32, m, split, stages, chunk, pipelined)   \
    KERNEL(add, ADD, m, split, stages, chunk, pipelined)   \
    KERNEL(swiglu, SWIGLU, m, split, stages, chunk, pipelined)

KERNELS(8, 1, 8, 4, true)
KERNELS(8, 1, 3, 2, false)
KERNELS(16, 1, 6, 1, true)
KERNELS(16, 1, 3, 1, false)
KERNELS(32, 2, 6, 1, true)
KERNELS(32, 1, 3, 1, false)
KERNELS(64, 2, 4, 1, true)
KERNELS(64, 1, 3, 1, false)
