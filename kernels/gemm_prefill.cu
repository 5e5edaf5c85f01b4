// y (M, N) = x (M, K) w (N, K)^T on the tensor cores of sm_90a, any M: TMA feeds wgmma. Hopper only.
//
// Math: y[m][n] = sum over k, ascending, 16 at a time, one fp32 accumulator in the tensor core, no split over K: the bits of
// mma.sync in gemm_decode.cu and gemm_portable.cu, whatever the tile. Then, on that accumulator,
//   f32: out[m][n] = y;  add: out[m][n] = out[m][n] + y, rounded once;  swiglu: out (bf16) = swiglu(gate, up), math.cuh.
// Layouts: x row-major bf16 behind a TMA map (boxes of 64 columns, 128-byte swizzle); w in the tiles of common.cuh, 16 rows x
//   64 columns of 2 KB, behind a map of whole tiles: in shared memory they stand as wgmma reads them. out fp32 (M, ld_out)
//   for f32 and add, written by TMA where N and ld_out are multiples of 4; for swiglu bf16 (M, ld_out), N/2 columns, N a
//   multiple of 16.
// Launch: kernels/gemm_prefill.py. 384 threads: a warpgroup whose first thread copies, two that multiply 64 x TILE_N each.
//   Persistent: block b takes tiles b, b + grid ... The blocks of a cluster share w or x: see Cluster.
// path: hopper
#include "math.cuh"

#if HAS_WGMMA || defined(APPLIANCE_EMULATE)

namespace {

enum Epilogue { F32, ADD, SWIGLU };

constexpr int TILE_M = 128, TILE_K = 64, TILE_BYTES = 2048;  // TILE_BYTES: 16 x 64 of w
constexpr int CONSUMERS = 2, WARPGROUP = 128, THREADS = WARPGROUP * (1 + CONSUMERS);
constexpr int A_BYTES = TILE_M * TILE_K * 2;
constexpr int CHUNK_BYTES = 16 * 128;  // of results: 16 rows of 128 bytes, 128-byte swizzle
constexpr int STAGING_BYTES = CONSUMERS * 4 * 2 * CHUNK_BYTES;  // two for each warp
constexpr int SHARED_LIMIT = 232448;  // kernels/gemm_prefill.py computes the same stages
constexpr int RASTER_M = 16;  // tiles of M that are walked together, so that a wave's x and w fit in L2

template <int TILE_N> struct Shape {
    static constexpr int B_BYTES = TILE_N * TILE_K * 2;
    static constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
    static constexpr int FIT = (SHARED_LIMIT - STAGING_BYTES - 256) / STAGE_BYTES;
    static constexpr int STAGES = FIT < 8 ? FIT : 8;
};

struct Problem {
    int M, N, k_pad;
    __device__ int k_tiles() const { return k_pad / TILE_K; }
};

struct Ring {  // a place in the ring of stages
    int stage = 0, parity = 0;
    template <int STAGES> __device__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Blocks of a cluster take neighbouring tiles: SHARE_W of them in M with one tile of w between them, or SHARE_X in N with
// one tile of x. Each copies its share of what is common to all of them.
template <int SHARE_W_, int SHARE_X_> struct Cluster {
    static constexpr int SHARE_W = SHARE_W_, SHARE_X = SHARE_X_, SIZE = SHARE_W * SHARE_X;
    static constexpr uint16_t ALL = (1 << SIZE) - 1;
    static_assert(SHARE_W == 1 || SHARE_X == 1);
};

// The tiles of a block in order. M in groups of RASTER_M tiles; within a group M is fastest.
template <int TILE_N, class C> struct Walk {
    int m_clusters, n_clusters, index, step, rank;
    __device__ Walk(const Problem& p) {
        m_clusters = (p.M + TILE_M * C::SHARE_W - 1) / (TILE_M * C::SHARE_W);
        n_clusters = (p.N + TILE_N * C::SHARE_X - 1) / (TILE_N * C::SHARE_X);
        rank = C::SIZE == 1 ? 0 : ptx::cluster_rank();
        index = blockIdx.x / C::SIZE;
        step = gridDim.x / C::SIZE;
    }
    __device__ bool done() const { return index >= m_clusters * n_clusters; }
    __device__ void next() { index += step; }
    __device__ void tile(int& m0, int& n0) const {  // may lie outside the result
        constexpr int GROUP = RASTER_M / C::SHARE_W;
        int group = index / (GROUP * n_clusters), inside = index - group * (GROUP * n_clusters);
        int size = min(GROUP, m_clusters - group * GROUP);
        m0 = (group * GROUP + inside % size) * C::SHARE_W * TILE_M;
        n0 = inside / size * C::SHARE_X * TILE_N;
        if (C::SHARE_W > 1) m0 += rank * TILE_M;
        if (C::SHARE_X > 1) n0 += rank * TILE_N;
    }
};

// ---- producer --------------------------------------------------------------------------------------------------------

// Asks L2 for a part of what `add` will read: late, so that it is still there.
template <int TILE_N> __device__ __forceinline__ void prefetch_residual(const Problem& p, const float* out, int ld_out, int m0, int n0, int kt) {
    constexpr int STEPS = 16;  // of K, the last ones
    const int step = kt - (p.k_tiles() - STEPS), first = m0 + step * (TILE_M / STEPS);
    if (step < 0 || ld_out % 4 || n0 + 4 > p.N) return;
    for (int row = first; row < min(first + TILE_M / STEPS, p.M); row++)
        ptx::bulk_prefetch_l2(out + (int64_t)row * ld_out + n0, min(TILE_N, (p.N - n0) & ~3) * 4);
}

template <int TILE_N, int EPILOGUE, class C>
__device__ void produce(const Problem& p, const TensorMap* x_map, const TensorMap* w_map, const float* out, int ld_out, uint8_t* stages, uint64_t* full, uint64_t* empty) {
    using S = Shape<TILE_N>;
    constexpr int ROW_TILES = TILE_N / 16 / C::SHARE_W, ROWS = TILE_M / C::SHARE_X;  // of w and of x: what this block copies
    static_assert(ROW_TILES * 16 * C::SHARE_W == TILE_N && ROWS % 8 == 0);
    Ring ring;
    bool first = true;
    for (Walk<TILE_N, C> walk(p); !walk.done(); walk.next()) {
        int m0, n0;
        walk.tile(m0, n0);
        auto load_w = [&](int stage, int kt) {
            const int share = C::SHARE_W == 1 ? 0 : walk.rank * ROW_TILES;
            uint8_t* b = stages + stage * S::STAGE_BYTES + A_BYTES + share * TILE_BYTES;
            ptx::mbarrier_arrive_expect(&full[stage], S::STAGE_BYTES);
            if (C::SHARE_W == 1) ptx::tma_load_tiles(b, w_map, kt, n0 / 16, &full[stage]);
            else ptx::tma_load_tiles_multicast(b, w_map, kt, n0 / 16 + share, &full[stage], C::ALL);
        };
        auto load_x = [&](int stage, int kt) {
            const int share = C::SHARE_X == 1 ? 0 : walk.rank * ROWS;
            uint8_t* a = stages + stage * S::STAGE_BYTES + share * 128;
            if (C::SHARE_X == 1) ptx::tma_load_2d(a, x_map, kt * TILE_K, m0, &full[stage]);
            else ptx::tma_load_2d_multicast(a, x_map, kt * TILE_K, m0 + share, &full[stage], C::ALL);
        };
        int kt = 0;
        if (first) {  // weights do not depend on the kernel before us: fetch them while it ends
            first = false;
            const int ahead = min(S::STAGES, p.k_tiles());
#pragma unroll 1
            for (; kt < ahead; kt++) load_w(kt, kt);
            ptx::wait_for_previous();
#pragma unroll 1
            for (kt = 0; kt < ahead; kt++) {
                load_x(kt, kt);
                ring.advance<S::STAGES>();
            }
        }
        for (; kt < p.k_tiles(); kt++) {
            ptx::mbarrier_wait(&empty[ring.stage], ring.parity ^ 1);
            load_w(ring.stage, kt);
            load_x(ring.stage, kt);
            ring.advance<S::STAGES>();
            if (EPILOGUE == ADD) prefetch_residual<TILE_N>(p, out, ld_out, m0, n0, kt);
        }
    }
    if (C::SIZE > 1)  // a block must not end before the others' consumers have told it that they are done
        for (int i = 0; i < S::STAGES; i++) {
            ptx::mbarrier_wait(&empty[ring.stage], ring.parity ^ 1);
            ring.advance<S::STAGES>();
        }
}

// ---- consumers -------------------------------------------------------------------------------------------------------

struct Thread {  // a consumer's place: its warpgroup's 64 rows, its warp's 16, its own row and columns (wgmma.cuh)
    int group, lane, warp_row, row, quad;
    __device__ Thread() {
        group = threadIdx.x / WARPGROUP - 1;
        lane = threadIdx.x % 32;
        warp_row = threadIdx.x / 32 % 4 * 16;
        row = lane / 4;  // of the warp's, and row + 8
        quad = lane % 4;
    }
};

__device__ __forceinline__ uint32_t staging_offset(int row, int byte) { return row * 128 + (byte ^ ((row & 7) << 4)); }

// acc (64 x TILE_N) of one tile. `before_last` is called before the last products are begun.
template <int TILE_N, class C, class Call>
__device__ __forceinline__ void multiply(float (&acc)[TILE_N / 2], int k_tiles, const Thread& t, const uint8_t* stages, uint64_t* full, uint64_t* empty, Ring& ring, Call before_last) {
    using S = Shape<TILE_N>;
    auto release = [&](int stage) {
        if (C::SIZE == 1) {
            if (t.lane == 0) ptx::mbarrier_arrive(&empty[stage]);
        } else if (t.lane < C::SIZE) {
            ptx::mbarrier_arrive_remote(&empty[stage], t.lane);
        }
    };
    int previous = -1;
    auto step = [&](int kt) {
        ptx::mbarrier_wait(&full[ring.stage], ring.parity);
        const uint8_t* a = stages + ring.stage * S::STAGE_BYTES + t.group * (A_BYTES / CONSUMERS);
        uint64_t descriptor_a = ptx::wgmma_descriptor(ptx::shared_address(a));
        uint64_t descriptor_b = ptx::wgmma_descriptor(ptx::shared_address(stages + ring.stage * S::STAGE_BYTES + A_BYTES));
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < TILE_K / 16; k++) ptx::wgmma<TILE_N>(acc, descriptor_a + 2 * k, descriptor_b + 2 * k, kt + k > 0);
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        if (previous >= 0) release(previous);
        previous = ring.stage;
        ring.advance<S::STAGES>();
    };
    for (int kt = 0; kt < k_tiles - 1; kt++) step(kt);
    before_last();
    step(k_tiles - 1);
    ptx::wgmma_wait<0>();
    release(previous);
}

// What `out` holds under a thread's accumulators, read some chunks of 32 columns ahead.
template <int TILE_N> struct Residual {
    static constexpr int CHUNKS = TILE_N / 32, FIT = (176 - TILE_N / 2) / 16;  // what registers allow
    static constexpr int AHEAD = CHUNKS < FIT ? CHUNKS : FIT;
    float values[AHEAD][16];
    const float* at;
    int rows, columns, ld;  // left below and to the right of `at`; none where rows of `out` are not aligned

    __device__ __forceinline__ Residual(const Problem& p, const Thread& t, const float* out, int ld_out, int m0, int n0) {
        const int row = m0 + t.row, column = n0 + 2 * t.quad;
        at = out + (int64_t)row * ld_out + column;
        rows = ((p.N | ld_out) & 3) == 0 ? p.M - row : 0;
        columns = p.N - column;
        ld = ld_out;
    }
    __device__ __forceinline__ void load(int chunk) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int row = (i & 1) * 8, column = chunk * 32 + i / 2 * 8;
            float2 v = make_float2(0.0f, 0.0f);
            if (row < rows && column < columns) v = *reinterpret_cast<const float2*>(at + (int64_t)row * ld + column);
            values[chunk % AHEAD][2 * i] = v.x;
            values[chunk % AHEAD][2 * i + 1] = v.y;
        }
    }
    __device__ __forceinline__ void load_first() {
#pragma unroll
        for (int c = 0; c < AHEAD; c++) load(c);
    }
    __device__ __forceinline__ void add(float (&acc)[TILE_N / 2], int chunk) {
#pragma unroll
        for (int i = 0; i < 16; i++) acc[16 * chunk + i] = __fadd_rn(values[chunk % AHEAD][i], acc[16 * chunk + i]);
        if (chunk + AHEAD < CHUNKS) load(chunk + AHEAD);
    }
};

// 32 columns of a warp's rows from its chunk, element by element: where N or the rows of `out` are no multiple of 16 bytes.
template <int EPILOGUE> __device__ __noinline__ void store_unaligned(const uint8_t* chunk, Problem p, float* out, int ld_out, int m0, int column) {
    const int lane = threadIdx.x % 32;
    for (int row = 0; row < min(16, p.M - m0) && column + lane < p.N; row++) {
        float* at = out + (int64_t)(m0 + row) * ld_out + column + lane;
        float v = *reinterpret_cast<const float*>(chunk + staging_offset(row, lane * 4));
        *at = EPILOGUE == ADD ? __fadd_rn(*at, v) : v;
    }
}

// A warp's 16 rows (from m0 on) of f32 and add: 32 columns at a time through shared memory and a TMA store.
template <int TILE_N, int EPILOGUE>
__device__ __forceinline__ void store_f32(float (&acc)[TILE_N / 2], Residual<TILE_N>& residual, const Problem& p, const Thread& t, const TensorMap* out_map, float* out, int ld_out, int m0, int n0, uint8_t* staging, int& turn) {
    const bool aligned = ((p.N | ld_out) & 3) == 0;
#pragma unroll
    for (int c = 0; c < TILE_N / 32; c++) {
        if (EPILOGUE == ADD && aligned) residual.add(acc, c);
        uint8_t* chunk = staging + (turn & 1) * CHUNK_BYTES;
        turn++;
        if (t.lane == 0) ptx::bulk_wait_read<1>();  // the store before the last has read this chunk
        __syncwarp();
        // Lanes of odd rows write the 8 columns two further on, so that 16 lanes fall on 32 different banks.
        const bool odd = t.row & 1;
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int even_at = 16 * c + 4 * j + 2 * half, odd_at = 16 * c + 4 * (j ^ 2) + 2 * half;
                float2 v = make_float2(odd ? acc[odd_at] : acc[even_at], odd ? acc[odd_at + 1] : acc[even_at + 1]);
                int byte = ((odd ? j ^ 2 : j) * 8 + 2 * t.quad) * 4;
                *reinterpret_cast<float2*>(chunk + staging_offset(t.row + 8 * half, byte)) = v;
            }
        ptx::fence_async_shared();
        __syncwarp();
        if (!aligned) {
            store_unaligned<EPILOGUE>(chunk, p, out, ld_out, m0, n0 + 32 * c);
            __syncwarp();
        } else if (t.lane == 0) {
            if (n0 + 32 * c < p.N && m0 < p.M) ptx::tma_store_2d(out_map, 2 * (n0 + 32 * c), m0, chunk);
            ptx::bulk_commit();
        }
    }
}

// A warp's 16 rows of swiglu: 64 columns of results at a time.
template <int TILE_N>
__device__ __forceinline__ void store_swiglu(const float (&acc)[TILE_N / 2], const Problem& p, const Thread& t, bf16* out, int ld_out, int m0, int n0, uint8_t* staging, int& turn) {
    constexpr int COLUMNS = TILE_N / 2;
#pragma unroll
    for (int first = 0; first < COLUMNS; first += 64) {
        constexpr int TILES = COLUMNS / 8;
        uint8_t* chunk = staging + (turn & 1) * CHUNK_BYTES;
        turn++;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (first / 8 + i >= TILES) break;
            const float* gate = acc + (first / 8 + i) * 8;
            const float* up = gate + 4;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                bf16 low = __float2bfloat16_rn(swiglu(gate[2 * half], up[2 * half]));
                bf16 high = __float2bfloat16_rn(swiglu(gate[2 * half + 1], up[2 * half + 1]));
                uint32_t pair = (uint32_t)__bfloat16_as_ushort(high) << 16 | __bfloat16_as_ushort(low);
                *reinterpret_cast<uint32_t*>(chunk + staging_offset(t.row + 8 * half, i * 16 + 4 * t.quad)) = pair;
            }
        }
        __syncwarp();  // the chunk before the last was read before this lane came here
        const int pieces = (COLUMNS - first < 64 ? COLUMNS - first : 64) / 8;  // 16 bytes each, of a row
#pragma unroll
        for (int i = t.lane; i < 16 * pieces; i += 32) {
            int row = i / pieces, piece = i % pieces, column = n0 / 2 + first + piece * 8;
            if (m0 + row < p.M && column < p.N / 2)
                *reinterpret_cast<uint4*>(out + (int64_t)(m0 + row) * ld_out + column) = *reinterpret_cast<const uint4*>(chunk + staging_offset(row, piece * 16));
        }
    }
}

template <int TILE_N, int EPILOGUE, class C>
__device__ void consume(const Problem& p, const TensorMap* out_map, void* out, int ld_out, const uint8_t* stages, uint8_t* staging, uint64_t* full, uint64_t* empty) {
    const Thread t;
    staging += (t.group * 4 + t.warp_row / 16) * 2 * CHUNK_BYTES;
    Ring ring;
    int turn = 0;
    ptx::wait_for_previous();
    for (Walk<TILE_N, C> walk(p); !walk.done(); walk.next()) {
        int m0, n0;
        walk.tile(m0, n0);
        m0 += 64 * t.group + t.warp_row;
        float acc[TILE_N / 2];
        if constexpr (EPILOGUE == SWIGLU) {
            multiply<TILE_N, C>(acc, p.k_tiles(), t, stages, full, empty, ring, [] {});
            store_swiglu<TILE_N>(acc, p, t, (bf16*)out, ld_out, m0, n0, staging, turn);
        } else {
            Residual<TILE_N> residual(p, t, (const float*)out, ld_out, m0, n0);
            multiply<TILE_N, C>(acc, p.k_tiles(), t, stages, full, empty, ring, [&] { if (EPILOGUE == ADD) residual.load_first(); });
            store_f32<TILE_N, EPILOGUE>(acc, residual, p, t, out_map, (float*)out, ld_out, m0, n0, staging, turn);
        }
    }
    if (EPILOGUE != SWIGLU && t.lane == 0) ptx::bulk_wait_read<0>();
}

template <int TILE_N, int EPILOGUE, class C>
__device__ __forceinline__ void gemm(const Common& common, const TensorMap* x_map, const TensorMap* w_map, const TensorMap* out_map, void* out, int M, int N, int k_pad, int ld_out) {
    using S = Shape<TILE_N>;
    begin_kernel(common);
    DYNAMIC_SHARED(smem);
    uint8_t* staging = smem + S::STAGES * S::STAGE_BYTES;
    uint64_t* full = reinterpret_cast<uint64_t*>(staging + STAGING_BYTES);
    uint64_t* empty = full + S::STAGES;
    if (threadIdx.x == 0) {
        ptx::tma_prefetch_map(w_map);
        ptx::tma_prefetch_map(x_map);
        for (int s = 0; s < S::STAGES; s++) {
            ptx::mbarrier_init(&full[s], 1);
            ptx::mbarrier_init(&empty[s], C::SIZE * CONSUMERS * (WARPGROUP / 32));
        }
        ptx::mbarrier_fence_init();
    }
    if (C::SIZE == 1) {
        __syncthreads();
    } else {
        ptx::cluster_arrive();
        ptx::cluster_wait();
    }
    const Problem p = {M, N, k_pad};
    if (threadIdx.x < WARPGROUP) {
        ptx::registers_lower<40>();
        if (threadIdx.x == 0) produce<TILE_N, EPILOGUE, C>(p, x_map, w_map, (const float*)out, ld_out, smem, full, empty);
    } else {
        ptx::registers_raise<232>();
        consume<TILE_N, EPILOGUE, C>(p, out_map, out, ld_out, smem, staging, full, empty);
    }
}

}  // namespace

#define GEMM_PREFILL(name, TILE_N, EPILOGUE, SHARE_W, SHARE_X)                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                                   \
    name(const Common common, const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,                \
         const __grid_constant__ TensorMap out_map, void* out, int M, int N, int k_pad, int ld_out) {                          \
        gemm<TILE_N, EPILOGUE, Cluster<SHARE_W, SHARE_X>>(common, &x_map, &w_map, &out_map, out, M, N, k_pad, ld_out);         \
    }
#ifndef GEMM_PREFILL_SOME
#define GEMM_PREFILL_ALL(SUFFIX, TILE_N, SHARE_W, SHARE_X)                                \
    GEMM_PREFILL(gemm_prefill_f32_##SUFFIX, TILE_N, F32, SHARE_W, SHARE_X)                \
    GEMM_PREFILL(gemm_prefill_add_##SUFFIX, TILE_N, ADD, SHARE_W, SHARE_X)                \
    GEMM_PREFILL(gemm_prefill_swiglu_##SUFFIX, TILE_N, SWIGLU, SHARE_W, SHARE_X)
// kernels/gemm_prefill.py:VARIANTS
GEMM_PREFILL_ALL(n32_x2, 32, 1, 2)
GEMM_PREFILL_ALL(n64_x2, 64, 1, 2)
GEMM_PREFILL_ALL(n64_x4, 64, 1, 4)
GEMM_PREFILL_ALL(n96, 96, 1, 1)
GEMM_PREFILL_ALL(n128, 128, 1, 1)
GEMM_PREFILL_ALL(n192, 192, 1, 1)
GEMM_PREFILL_ALL(n224, 224, 1, 1)
GEMM_PREFILL_ALL(n256, 256, 1, 1)
GEMM_PREFILL_ALL(n128_w2, 128, 2, 1)
GEMM_PREFILL_ALL(n192_w2, 192, 2, 1)
GEMM_PREFILL_ALL(n224_w2, 224, 2, 1)
GEMM_PREFILL_ALL(n256_w2, 256, 2, 1)
#endif
#endif
