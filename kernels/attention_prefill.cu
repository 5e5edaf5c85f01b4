// Attention of prefill rows: a tile of query tokens of one sequence against its KV pages, causal. The arithmetic is
// attention_core.cuh's, so a token's output has the bits that decode would give it.
//
//   out[t][h * D + d] = sum_k softmax_k(q[t][h] . K[k] / sqrt(D)) V[k][d], k over the positions visible to token t
//
// Block = (tile, head block): its rows are the tile's tokens times the heads that share a KV head (token-major), 16 rows
// a warp, so that K and V of a page are read once for all of them. A warp holds the page's 16 x 128 scores, then P, a part
// of the page's o, and the merged o in registers. tiles (num_tiles, 2): first token row, number of tokens; rows of one sequence at
// consecutive positions, tokens * min(16, Hq / Hkv) <= rows of a block (kernels/attention.py:tile_tokens). Longest tiles
// first. head_dim 256 takes two blocks, each computing the scores and half of the columns of V.
//
// q (T, Hq, Dp) bf16; k_layer, v_layer: common.cuh, "layouts"; out bf16 row-major (T, ld_out).
// sm_90a: wgmma by two warpgroups of 64 rows, pages arrive in a ring of buffers by bulk copies. Elsewhere, and for Dp = 96:
// mma.sync, cp.async by all threads, one page at a time.
#include "attention_tile.cuh"

namespace {

// ---- mma.sync --------------------------------------------------------------------------------------------------------

// Scores of a warp's rows with the keys of a page's groups [group0, group1), by halves of a page; elsewhere -inf or more scores.
template <int DP> __device__ __forceinline__ void scores_page(float (&t)[64], uint32_t k_page, uint32_t q, int group0, int group1, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        bool wanted = 2 * half < group1 && 2 * half + 2 > group0;
        float(&part)[32] = *reinterpret_cast<float(*)[32]>(t + 32 * half);
#pragma unroll
        for (int i = 0; i < 32; i++) part[i] = wanted ? 0.0f : MINUS_INFINITY;
        if (!wanted) continue;
#pragma unroll
        for (int step = 0; step < DP / 16; step++) {
            uint32_t a[4];
            ptx::ldmatrix_x4(a, q + (lane & 15) * (2 * DP + 16) + (2 * step + (lane >> 4)) * 16);
            scores_step<DP, 8>(part, a, k_page, half * 64, step, lane);
        }
    }
}

template <int DP, int ROWS> __device__ __forceinline__ void prefill_mma(const Common& common, const Prefill& p) {
    constexpr int COLUMNS = DP == 256 ? 128 : DP, PARTS = DP / COLUMNS, THREADS = ROWS * 2, PAGE_BYTES = PAGE_TOKENS * DP * 2;
    constexpr int V_OFFSET = DP == 256 ? 0 : PAGE_BYTES;  // with 256 columns V takes the place of K: 99 KB is all that sm_86 has
    constexpr int TILES = COLUMNS % 64 == 0 ? 8 : 6;      // so many columns of o_page at a time that registers suffice
    DYNAMIC_SHARED(smem);
    uint8_t *v_page = smem + V_OFFSET, *q_rows = smem + V_OFFSET + PAGE_BYTES;
    HeadBlocks blocks(p.num_heads, p.num_kv_heads);
    int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, part = blockIdx.x % PARTS;
    ptx::wait_for_previous();
    Tile tile = read_tile(p, blocks.per_group * p.num_kv_heads, blockIdx.x / PARTS);
    if (tile.tokens <= 0) return;
    load_q<DP, ROWS>(p, tile, blocks, q_rows, thread, THREADS, [](int row, int chunk) { return row * (2 * DP + 16) + chunk * 16; });
    Rows rows(p, tile, blocks, warp, lane);
    State<COLUMNS> state;
    clear(state);
    for (int n = 0; n < tile.pages; n++) {
        int page0 = (tile.first_page + n) * PAGE_TOKENS, end = page_end(tile, n), from = max(0, first_visible(p, tile.first_position) - page0) / GROUP_KEYS * GROUP_KEYS;
        int64_t offset = page_offset<DP>(common, p, blocks, tile, n, thread == 0);
        load_tokens<DP>(smem, p.k_layer + offset, from, end, thread, THREADS);
        ptx::cp_async_commit();
        if (V_OFFSET != 0) load_tokens<DP>(v_page, p.v_layer + offset, from, end, thread, THREADS);
        ptx::cp_async_commit();
        ptx::cp_async_wait<1>();
        __syncthreads();
        int group0 = max(0, rows.any_first - page0) / GROUP_KEYS, group1 = min(GROUPS, group_end(max(0, rows.any_end - page0)) / GROUP_KEYS);
        float t[64];
        uint32_t probability[GROUPS][2][4];
        Factors factors;
        if (group0 < group1) scores_page<DP>(t, ptx::shared_address(smem), ptx::shared_address(q_rows + warp * 16 * (2 * DP + 16)), group0, group1, lane);
        if (V_OFFSET == 0) {
            __syncthreads();
            load_tokens<DP>(v_page, p.v_layer + offset, from, end, thread, THREADS);
            ptx::cp_async_commit();
        }
        if (group0 < group1) factors = softmax_page(state, t, probability, rows, page0, p.scale_log2, lane);
        zero_tokens<DP>(v_page, end, group_end(end), thread, THREADS);
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (group0 < group1) {
#pragma unroll
            for (int tile0 = 0; tile0 < COLUMNS / 8; tile0 += TILES) {
                float o[TILES * 4];
#pragma unroll
                for (int i = 0; i < TILES * 4; i++) o[i] = 0.0f;
#pragma unroll
                for (int group = 0; group < GROUPS; group++)
                    if (group >= group0 && group < group1)
                        values_group<DP, TILES>(o, probability[group], ptx::shared_address(v_page), group, part * (COLUMNS / 8) + tile0, lane);
                merge_columns(state.o + tile0 * 4, o, factors);
            }
        }
        __syncthreads();
    }
    store_tile(p, tile, blocks, state, part * COLUMNS, warp, lane);
}

#if HAS_WGMMA
// ---- wgmma -----------------------------------------------------------------------------------------------------------

// A fixed grid of blocks takes tiles blockIdx.x, + gridDim.x ... Three warpgroups: 0 and 1 compute 64 rows each; of the
// third, one warp copies pages into a ring of buffers, the others q into one of two, ahead of the computing warps.
constexpr int COMPUTE_WARPS = 8, Q_THREADS = 96, ROWS = 128;

template <int DP, int STAGES> struct Ring {
    static constexpr int COLUMNS = DP == 256 ? 128 : DP, PARTS = DP / COLUMNS;  // of V, a block; blocks for all of them
    static constexpr int K_BYTES = PAGE_TOKENS * DP * 2, V_BYTES = PAGE_TOKENS * COLUMNS * 2, Q_BYTES = ROWS * DP * 2;
    static constexpr int Q_SLOTS = DP == 256 ? 1 : 2;

    uint64_t full[2][STAGES], empty[2][STAGES];  // of K, of V
    uint64_t q_full[Q_SLOTS], q_empty[Q_SLOTS];
    Tile tiles[COMPUTE_WARPS];  // that each computing warp is at: its registers are scarce

    __device__ __forceinline__ void init() {
        for (int i = 0; i < 2 * STAGES; i++) {
            ptx::mbarrier_init(&full[0][0] + i, 1);
            ptx::mbarrier_init(&empty[0][0] + i, COMPUTE_WARPS * WARP_ARRIVALS);
        }
        for (int i = 0; i < Q_SLOTS; i++) {
            ptx::mbarrier_init(&q_full[i], Q_THREADS);
            ptx::mbarrier_init(&q_empty[i], COMPUTE_WARPS * WARP_ARRIVALS);
        }
        ptx::mbarrier_fence_init();
    }
    static __device__ __forceinline__ uint8_t* buffer(uint8_t* smem, int value, int n) { return smem + n % STAGES * (K_BYTES + V_BYTES) + value * K_BYTES; }
    static __device__ __forceinline__ uint8_t* q_buffer(uint8_t* smem, int i) { return smem + STAGES * (K_BYTES + V_BYTES) + i % Q_SLOTS * Q_BYTES; }

    __device__ __forceinline__ void wait(int value, int n) { ptx::mbarrier_wait(&full[value][n % STAGES], n / STAGES % 2); }
    __device__ __forceinline__ void wait_empty(int value, int n) { ptx::mbarrier_wait(&empty[value][n % STAGES], n / STAGES % 2 ^ 1); }
    // After the last read of a buffer, by each warp.
    __device__ __forceinline__ void release(int value, int n, int lane) { warp_arrive(&empty[value][n % STAGES], lane); }
};

__device__ __forceinline__ int num_items(const Prefill& p, const HeadBlocks& blocks, int parts) { return p.num_tiles * blocks.per_group * p.num_kv_heads * parts; }

// One warp: K and V (this block's columns of it) of all pages of all tiles. V beyond the last token is zero.
template <int DP, int STAGES> __device__ __forceinline__ void copy_pages(const Common& common, const Prefill& p, Ring<DP, STAGES>& ring, uint8_t* smem) {
    using R = Ring<DP, STAGES>;
    using P = Panels<DP>;
    HeadBlocks blocks(p.num_heads, p.num_kv_heads);
    int items = num_items(p, blocks, R::PARTS), lane = threadIdx.x & 31, copied = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        Tile tile = read_tile(p, blocks.per_group * p.num_kv_heads, item / R::PARTS);
        for (int n = 0; n < tile.pages; n++, copied++) {
            int64_t offset = page_offset<DP>(common, p, blocks, tile, n, lane == 0);
            int end = page_end(tile, n);
            for (int value = 0; value < 2; value++) {
                int panels = value ? R::COLUMNS / 64 : P::COUNT, panel0 = value ? item % R::PARTS * panels : 0;
                uint8_t* buffer = R::buffer(smem, value, copied);
                uint64_t* bar = &ring.full[value][copied % STAGES];
                ring.wait_empty(value, copied);
                if (value == 1 && end < PAGE_TOKENS) {
                    zero_tokens<R::COLUMNS>(buffer, end, end <= 64 ? 64 : 128, lane, 32);
                    ptx::fence_async_shared();
                    __syncwarp();
                }
                if (lane == 0) {
                    ptx::mbarrier_arrive_expect(bar, panels * end * P::ROW_BYTES);
                    const bf16* source = (value ? p.v_layer : p.k_layer) + offset;
                    for (int i = 0; i < panels; i++) ptx::bulk_copy(buffer + i * P::PANEL_BYTES, source + (panel0 + i) * (P::PANEL_BYTES / 2), end * P::ROW_BYTES, bar);
                }
                __syncwarp();
            }
        }
    }
}

// Three warps: q of all tiles.
template <int DP, int STAGES> __device__ __forceinline__ void copy_q(const Prefill& p, Ring<DP, STAGES>& ring, uint8_t* smem) {
    using R = Ring<DP, STAGES>;
    HeadBlocks blocks(p.num_heads, p.num_kv_heads);
    int items = num_items(p, blocks, R::PARTS), thread = threadIdx.x - (COMPUTE_WARPS + 1) * 32, i = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x, i++) {
        Tile tile = read_tile(p, blocks.per_group * p.num_kv_heads, item / R::PARTS);
        ptx::mbarrier_wait(&ring.q_empty[i % R::Q_SLOTS], i / R::Q_SLOTS % 2 ^ 1);
        load_q<DP, ROWS>(p, tile, blocks, R::q_buffer(smem, i), thread, Q_THREADS, [](int row, int chunk) { return page_chunk(chunk, row, DP) * 16; });
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        ptx::fence_async_shared();
        ptx::mbarrier_arrive(&ring.q_full[i % R::Q_SLOTS]);
    }
}

// Starts the scores of a warpgroup's 64 rows with a page. Descriptors of q and K.
template <int DP> __device__ __forceinline__ void start_scores(float (&t)[64], uint64_t q, uint64_t k_page) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < DP / 16; step++) {
        uint32_t place = step / 4 * Panels<DP>::PANEL_BYTES + step % 4 * 32;
        ptx::wgmma<128>(t, q + place / 16, k_page + place / 16, step > 0);
    }
    ptx::wgmma_commit();
}

// Starts P.V of the first HALVES * 64 keys for 64 columns of V, whose descriptor it is.
template <int HALVES> __device__ __forceinline__ void start_values(float (&o)[32], const uint32_t (&p)[GROUPS][2][4], uint64_t v_panel) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4 * HALVES; step++) ptx::wgmma_transposed<64>(o, p[step / 2][step % 2], v_panel + step * (16 * 128 / 16), step > 0);
    ptx::wgmma_commit();
}

constexpr int PANEL = PAGE_TOKENS * 128 / 16;  // from one panel's descriptor to the next

// A warpgroup's 64 rows of one tile. The scores of a page are computed while P.V of the page before is.
template <int DP, int STAGES>
__device__ __forceinline__ void compute_tile(const Prefill& p, const HeadBlocks& blocks, const Tile& tile, Ring<DP, STAGES>& ring, uint8_t* smem, uint64_t q, int read, int column0, int warp, int lane) {
    using R = Ring<DP, STAGES>;
    constexpr bool OVERLAP = DP < 256;  // of the scores with P.V: registers do not suffice for 256
    Rows rows(p, tile, blocks, warp, lane);
    State<R::COLUMNS> state;
    clear(state);
    // The pages that this warpgroup's rows see; the last of them may be half a page.
    int heads = blocks.heads(tile.block), low = warp / 4 * 64 / heads, high = min(tile.tokens - 1, (warp / 4 * 64 + 63) / heads);
    int end = low < tile.tokens ? tile.first_position + high + 1 - tile.first_page * PAGE_TOKENS : 0, pages = (end + PAGE_TOKENS - 1) / PAGE_TOKENS;
    float t[64], o[32];
    uint32_t probability[GROUPS][2][4];
    auto k_descriptor = [&](int n) { return ptx::wgmma_descriptor(ptx::shared_address(R::buffer(smem, 0, read + n))); };
    auto v_descriptor = [&](int n) { return ptx::wgmma_descriptor(ptx::shared_address(R::buffer(smem, 1, read + n))); };
    if (pages > 0) {
        ring.wait(0, read);
        start_scores<DP>(t, q, k_descriptor(0));
        ptx::wgmma_wait<0>(t);
        ring.release(0, read, lane);
        for (int n = 0; n < pages - 1; n++) {
            Factors factors = softmax_page(state, t, probability, rows, (tile.first_page + n) * PAGE_TOKENS, p.scale_log2, lane);
            ring.wait(1, read + n);
            start_values<2>(o, probability, v_descriptor(n));
            if (OVERLAP) {
                ring.wait(0, read + n + 1);
                start_scores<DP>(t, q, k_descriptor(n + 1));
            }
            ptx::wgmma_wait<OVERLAP>(o);
            merge_columns(state.o, o, factors);
            if (R::COLUMNS == 128) {
                start_values<2>(o, probability, v_descriptor(n) + PANEL);
                ptx::wgmma_wait<0>(o);
                merge_columns(state.o + R::COLUMNS / 2 - 32, o, factors);
            }
            if (!OVERLAP) {
                ring.wait(0, read + n + 1);
                start_scores<DP>(t, q, k_descriptor(n + 1));
            }
            ptx::wgmma_wait<0>(t);
            ring.release(1, read + n, lane);
            ring.release(0, read + n + 1, lane);
        }
        int n = pages - 1;
        Factors factors = softmax_page(state, t, probability, rows, (tile.first_page + n) * PAGE_TOKENS, p.scale_log2, lane);
        ring.wait(1, read + n);
#pragma unroll
        for (int panel = 0; panel < R::COLUMNS / 64; panel++) {
            if (end > n * PAGE_TOKENS + 64)
                start_values<2>(o, probability, v_descriptor(n) + panel * PANEL);
            else
                start_values<1>(o, probability, v_descriptor(n) + panel * PANEL);
            ptx::wgmma_wait<0>(o);
            merge_columns(state.o + 32 * panel, o, factors);
        }
        ring.release(1, read + n, lane);
    }
    for (int n = pages; n < tile.pages; n++) {
        for (int value = 0; value < 2; value++) {
            ring.wait(value, read + n);
            ring.release(value, read + n, lane);
        }
    }
    store_tile(p, tile, blocks, state, column0, warp, lane);
}

template <int DP, int STAGES> __device__ __forceinline__ void compute_tiles(const Prefill& p, Ring<DP, STAGES>& ring, uint8_t* smem) {
    using R = Ring<DP, STAGES>;
    HeadBlocks blocks(p.num_heads, p.num_kv_heads);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int items = num_items(p, blocks, R::PARTS), i = 0, pages_before = 0;  // pages that earlier tiles of this block had
    for (int item = blockIdx.x; item < items; item += gridDim.x, i++) {
        int slot = i % R::Q_SLOTS;
        // Each warp reads it for itself: mbarriers would order a copy from the copying warps too, but racecheck cannot see it.
        const Tile& tile = ring.tiles[warp];
        if (lane == 0) ring.tiles[warp] = read_tile(p, blocks.per_group * p.num_kv_heads, item / R::PARTS);
        __syncwarp();
        ptx::mbarrier_wait(&ring.q_full[slot], i / R::Q_SLOTS % 2);
        uint64_t q = ptx::wgmma_descriptor(ptx::shared_address(R::q_buffer(smem, i)) + warp / 4 * (64 * 128));
        compute_tile<DP, STAGES>(p, blocks, tile, ring, smem, q, pages_before, item % R::PARTS * R::COLUMNS, warp, lane);
        pages_before += tile.pages;
        warp_arrive(&ring.q_empty[slot], lane);
    }
}

template <int DP, int STAGES> __device__ __forceinline__ void prefill_wgmma(const Common& common, const Prefill& p) {
    DYNAMIC_SHARED(smem);
    __shared__ Ring<DP, STAGES> ring;
    if (threadIdx.x == 0) ring.init();
    __syncthreads();
    ptx::wait_for_previous();
    if (threadIdx.x >= COMPUTE_WARPS * 32) {
        ptx::registers_lower<56>();
        if (threadIdx.x < COMPUTE_WARPS * 32 + 32)
            copy_pages<DP, STAGES>(common, p, ring, smem);
        else
            copy_q<DP, STAGES>(p, ring, smem);
    } else {
        ptx::registers_raise<224>();
        compute_tiles<DP, STAGES>(p, ring, smem);
    }
}
#endif

}  // namespace

#if HAS_WGMMA
#define PREFILL_THREADS(DP, ROWS) (DP == 96 ? ROWS * 2 : 384)
#else
#define PREFILL_THREADS(DP, ROWS) (ROWS * 2)
#endif

#define ATTENTION_PREFILL(DP, ROWS, BODY)                                                                                                          \
    extern "C" __global__ void __launch_bounds__(PREFILL_THREADS(DP, ROWS), 1) attention_prefill_d##DP(                                           \
        const Common common, const bf16* q, const bf16* k_layer, const bf16* v_layer, bf16* out, const int32_t* tiles, const int32_t* positions,  \
        const int32_t* slots, const int32_t* block_tables, int num_tiles, int table_width, int num_pages, int num_heads, int num_kv_heads,        \
        int head_dim, int ld_out, float scale_log2, int window) {                                                                                 \
        begin_kernel(common);                                                                                                                     \
        Prefill p = {q,         k_layer,     v_layer,   out,       tiles,        positions, slots,  block_tables,                                 \
                     num_tiles, table_width, num_pages, num_heads, num_kv_heads, head_dim,  ld_out, scale_log2, window};                          \
        BODY(common, p);                                                                                                                          \
    }

// Rows and page buffers of a block: kernels/attention.py knows the same numbers.
ATTENTION_PREFILL(96, 128, (prefill_mma<96, 128>))
#if HAS_WGMMA
ATTENTION_PREFILL(64, 128, (prefill_wgmma<64, 4>))
ATTENTION_PREFILL(128, 128, (prefill_wgmma<128, 2>))
ATTENTION_PREFILL(256, 128, (prefill_wgmma<256, 1>))
#else
ATTENTION_PREFILL(64, 128, (prefill_mma<64, 128>))
ATTENTION_PREFILL(128, 128, (prefill_mma<128, 128>))
ATTENTION_PREFILL(256, 64, (prefill_mma<256, 64>))
#endif
