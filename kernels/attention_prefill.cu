// Attention of prefill rows: a tile of query tokens of one sequence against its KV pages, causal. The arithmetic is
// attention_core.cuh's, so a token's output has the bits that decode would give it.
//
//   out[t][h * D + d] = sum_k softmax_k(q[t][h] . K[k] / sqrt(D)) V[k][d], k over the positions visible to token t
//
// Block = (tile, head block): its rows are the tile's tokens times the heads that share a KV head (token-major), 16 rows
// a warp, so that K and V of a page are read once for all of them. A warp holds the page's 16 x 128 scores, then P, a part
// of the page's o, and the merged o in registers. tiles (num_tiles, 2): first token row, number of tokens; rows of one sequence in
// ascending positions, tokens * min(16, Hq / Hkv) <= rows of a block (kernels/attention.py:tile_tokens). Longest tiles
// first. head_dim 256 takes two blocks, each computing the scores and half of the columns of V.
//
// q (T, Hq, Dp) bf16; k_layer, v_layer: common.cuh, "layouts"; out bf16 row-major (T, ld_out).
// sm_90a: wgmma by two warpgroups of 64 rows, pages arrive in a ring of buffers by bulk copies. Elsewhere, and for Dp = 96:
// mma.sync, cp.async by all threads, one page at a time.
#include "attention_core.cuh"

namespace {

using namespace attention;

struct Prefill {
    const bf16* q;
    const bf16* k_layer;
    const bf16* v_layer;
    bf16* out;
    const int32_t* tiles;
    const int32_t* positions;
    const int32_t* slots;
    const int32_t* block_tables;
    int table_width, num_pages, num_heads, num_kv_heads, head_dim, ld_out;
    float scale_log2;
    int window;
};

struct Tile {
    int token, tokens;  // first row, number of rows
    int block;          // head block
    int slot, first_position, last_position;
    int first_page, end_page;
};

__device__ __forceinline__ Tile read_tile(const Prefill& p, int num_blocks, int index) {
    Tile tile = {};
    int i = index / num_blocks;
    tile.block = index % num_blocks;
    tile.token = __ldcg(p.tiles + 2 * i);
    tile.tokens = __ldcg(p.tiles + 2 * i + 1);
    if (tile.tokens <= 0) return tile;
    tile.slot = __ldcg(p.slots + tile.token);
    tile.first_position = __ldcg(p.positions + tile.token);
    tile.last_position = __ldcg(p.positions + tile.token + tile.tokens - 1);
    tile.first_page = p.window > 0 ? max(0, tile.first_position - p.window + 1) / PAGE_TOKENS : 0;
    tile.end_page = tile.last_position / PAGE_TOKENS + 1;
    return tile;
}

// One query row.
struct Row {
    int token, head;  // head < 0: no such row
    int first, end;   // visible positions
};

__device__ __forceinline__ Row read_row(const Prefill& p, const Tile& tile, const HeadBlocks& blocks, int row) {
    int heads = blocks.heads(tile.block), token = row / heads;
    if (token >= tile.tokens) return {0, -1, 0, 0};
    int position = __ldcg(p.positions + tile.token + token);
    return {tile.token + token, blocks.first_head(tile.block) + row % heads, p.window > 0 ? max(0, position - p.window + 1) : 0, position + 1};
}

// A warp's 16 rows: those of this lane (g and g + 8), and what all rows, or any row, can see.
struct Rows {
    int first[2], end[2];    // visible positions
    int any_first, any_end;  // outside: visible to no row
    int all_first, all_end;  // inside: visible to every row

    __device__ __forceinline__ Rows(const Prefill& p, const Tile& tile, const HeadBlocks& blocks, int warp, int lane) {
        any_first = all_end = INT32_MAX;
        any_end = all_first = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Row row = read_row(p, tile, blocks, warp * 16 + (lane >> 2) + 8 * half);
            first[half] = row.first;
            end[half] = row.end;
            if (row.head >= 0) any_first = min(any_first, row.first);
            any_end = max(any_end, row.end);
            all_first = max(all_first, row.first);
            all_end = min(all_end, row.end);
        }
        for (int step = 4; step < 32; step *= 2) {
            any_first = min(any_first, __shfl_xor_sync(0xFFFFFFFFu, any_first, step));
            any_end = max(any_end, __shfl_xor_sync(0xFFFFFFFFu, any_end, step));
            all_first = max(all_first, __shfl_xor_sync(0xFFFFFFFFu, all_first, step));
            all_end = min(all_end, __shfl_xor_sync(0xFFFFFFFFu, all_end, step));
        }
    }
};

// The running result of a warp's 16 rows, COLUMNS of V.
template <int COLUMNS> struct State {
    float m[2], l[2];
    float o[COLUMNS / 2];
};

template <int COLUMNS> __device__ __forceinline__ void clear(State<COLUMNS>& state) {
    state.m[0] = state.m[1] = MINUS_INFINITY;
    state.l[0] = state.l[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) state.o[i] = 0.0f;
}

// What becomes of a page's scores t: P, and m, l merged. a, b: the factors with which o_page is to be merged, rows g and g + 8.
struct Factors {
    float a[2], b[2];
};
template <int COLUMNS>
__device__ __forceinline__ Factors softmax_page(State<COLUMNS>& state, float (&t)[64], uint32_t (&p)[GROUPS][2][4], const Rows& rows, int page0, float scale_log2, int lane) {
    float largest_of[2] = {MINUS_INFINITY, MINUS_INFINITY}, m[2], base[2], sums[2][GROUPS];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int key0 = page0 + half * 64;
        if (key0 < rows.all_first || key0 + 64 > rows.all_end) mask<8>(t + 32 * half, key0, lane, rows.first[0], rows.end[0], rows.first[1], rows.end[1]);
        largest<8>(t + 32 * half, largest_of[0], largest_of[1]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        m[i] = page_maximum(quad_max(largest_of[i]), scale_log2);
        base[i] = m[i] == MINUS_INFINITY ? 0.0f : m[i];
    }
#pragma unroll
    for (int group = 0; group < GROUPS; group++) probabilities(p[group], sums[0][group], sums[1][group], t + 16 * group, base[0], base[1], scale_log2);
    Factors factors;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float l = page_sum(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
        merge_factors(state.m[i], m[i], factors.a[i], factors.b[i]);
        state.l[i] = merged(state.l[i], factors.a[i], l, factors.b[i]);
    }
    return factors;
}

template <int N> __device__ __forceinline__ void merge_columns(float* state, const float (&o)[N], const Factors& factors) {
#pragma unroll
    for (int i = 0; i < N; i++) state[i] = merged(state[i], factors.a[i / 2 % 2], o[i], factors.b[i / 2 % 2]);
}

template <int COLUMNS>
__device__ __forceinline__ void store_tile(const Prefill& p, const Tile& tile, const HeadBlocks& blocks, const State<COLUMNS>& state, int column0, int warp, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        Row row = read_row(p, tile, blocks, warp * 16 + (lane >> 2) + 8 * half);
        if (row.head < 0) continue;
        float inverse_l = inverse(state.l[half]);
        bf16* target = p.out + (int64_t)row.token * p.ld_out + row.head * p.head_dim;
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            int column = column0 + i * 8 + (lane & 3) * 2;
            if (column < p.head_dim)
                *reinterpret_cast<uint32_t*>(target + column) = ptx::pair_bf16(finish(state.o[4 * i + 2 * half], inverse_l), finish(state.o[4 * i + 2 * half + 1], inverse_l));
        }
    }
}

// q of the tile to shared memory at place(row, chunk) bytes, zeros for rows that are not there; the caller commits.
template <int DP, int ROWS, class Place>
__device__ __forceinline__ void load_q(const Prefill& p, const Tile& tile, const HeadBlocks& blocks, uint8_t* q_rows, int thread, int threads, Place place) {
    int heads = blocks.heads(tile.block);
    for (int i = thread; i < ROWS * (DP / 8); i += threads) {
        int row = i / (DP / 8), chunk = i % (DP / 8), token = row / heads;
        bool there = token < tile.tokens;
        const bf16* source = p.q + ((int64_t)(tile.token + (there ? token : 0)) * p.num_heads + blocks.first_head(tile.block) + row % heads) * DP + chunk * 8;
        ptx::cp_async_16(ptx::shared_address(q_rows + place(row, chunk)), source, there ? 16 : 0);
    }
}

template <int DP> __device__ __forceinline__ int64_t page_offset(const Common& common, const Prefill& p, const HeadBlocks& blocks, const Tile& tile, int page, bool report) {
    int64_t index = page_index(common, p.block_tables, p.table_width, p.num_pages, tile.slot, page, blocks.first_head(tile.block), tile.last_position, report);
    return (index * p.num_kv_heads + blocks.kv_head(tile.block)) * (PAGE_TOKENS * DP);
}

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

// The tokens of a page that the tile needs: [from, end).
__device__ __forceinline__ void needed(const Prefill& p, const Tile& tile, int page, int& from, int& end) {
    int first = p.window > 0 ? max(0, tile.first_position - p.window + 1) : 0;
    from = max(0, first - page * PAGE_TOKENS) / GROUP_KEYS * GROUP_KEYS;
    end = min(PAGE_TOKENS, tile.last_position + 1 - page * PAGE_TOKENS);
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
    for (int page = tile.first_page; page < tile.end_page; page++) {
        int page0 = page * PAGE_TOKENS, from, end;
        needed(p, tile, page, from, end);
        int64_t offset = page_offset<DP>(common, p, blocks, tile, page, thread == 0);
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

// Page buffers in shared memory: K and V (the block's columns of it) in turn, filled by thread 0, which also computes.
template <int DP, int COLUMNS, int STAGES> struct Ring {
    static constexpr int K_BYTES = PAGE_TOKENS * DP * 2, V_BYTES = PAGE_TOKENS * COLUMNS * 2, BYTES = STAGES * (K_BYTES + V_BYTES);
    uint64_t full[2][STAGES], empty[2][STAGES];  // of K, of V

    __device__ __forceinline__ void init() {
        for (int i = 0; i < 2 * STAGES; i++) {
            ptx::mbarrier_init(&full[0][0] + i, 1);
            ptx::mbarrier_init(&empty[0][0] + i, 8);  // warps
        }
        ptx::mbarrier_fence_init();
    }
    static __device__ __forceinline__ uint8_t* buffer(uint8_t* smem, int value, int n) {
        return smem + n % STAGES * (K_BYTES + V_BYTES) + value * K_BYTES;
    }
    // Page number n of the block (0, 1 ...): tokens [0, end) of K, or of V's columns from the panel `panel0` on, as soon as
    // all warps are done with what the buffer held.
    __device__ __forceinline__ void fill(uint8_t* smem, int value, int n, const bf16* page, int panel0, int end) {
        using P = Panels<DP>;
        int count = value ? COLUMNS / 64 : P::COUNT, bytes = end * P::ROW_BYTES;
        uint64_t* bar = &full[value][n % STAGES];
        ptx::mbarrier_wait(&empty[value][n % STAGES], n / STAGES % 2 ^ 1);
        ptx::mbarrier_arrive_expect(bar, count * bytes);
        for (int i = 0; i < count; i++) ptx::bulk_copy(buffer(smem, value, n) + i * P::PANEL_BYTES, page + (panel0 + i) * (P::PANEL_BYTES / 2), bytes, bar);
    }
    __device__ __forceinline__ void wait(int value, int n) { ptx::mbarrier_wait(&full[value][n % STAGES], n / STAGES % 2); }
    // After the last read of a buffer, by each warp.
    __device__ __forceinline__ void release(int value, int n, int lane) {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&empty[value][n % STAGES]);
    }
};

// Scores of a warpgroup's 64 rows with the first HALVES * 64 keys of a page; the others are invisible. Descriptors of q and K.
template <int DP, int HALVES> __device__ __forceinline__ void scores_wgmma(float (&t)[64], uint64_t q, uint64_t k_page) {
    float(&part)[32 * HALVES] = *reinterpret_cast<float(*)[32 * HALVES]>(&t);
#pragma unroll
    for (int i = 32 * HALVES; i < 64; i++) t[i] = MINUS_INFINITY;
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < DP / 16; step++) {
        uint32_t place = step / 4 * Panels<DP>::PANEL_BYTES + step % 4 * 32;
        ptx::wgmma<64 * HALVES>(part, q + place / 16, k_page + place / 16, step > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
}

// state.o merged with P.V of the first HALVES * 64 keys, 64 columns at a time. Descriptor of V.
template <int COLUMNS, int HALVES>
__device__ __forceinline__ void values_wgmma(State<COLUMNS>& state, const uint32_t (&p)[GROUPS][2][4], uint64_t v_page, const Factors& factors) {
#pragma unroll
    for (int panel = 0; panel < COLUMNS / 64; panel++) {
        float o[32];
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4 * HALVES; step++)
            ptx::wgmma_transposed<64>(o, p[step / 2][step % 2], v_page + (panel * (PAGE_TOKENS * 128) + step * (16 * 128)) / 16, step > 0);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        merge_columns(state.o + 32 * panel, o, factors);
    }
}

// One page for a warpgroup. k_read() is called after the last read of K; v_ready() returns when V may be read.
template <int DP, int COLUMNS, int HALVES, class KRead, class VReady>
__device__ __forceinline__ void page_wgmma(State<COLUMNS>& state, uint64_t q, uint32_t k_page, uint32_t v_page, const Rows& rows, int page0, float scale_log2, int lane, KRead k_read, VReady v_ready) {
    float t[64];
    uint32_t probability[GROUPS][2][4];
    scores_wgmma<DP, HALVES>(t, q, ptx::wgmma_descriptor(k_page));
    k_read();
    Factors factors = softmax_page(state, t, probability, rows, page0, scale_log2, lane);
    v_ready();
    values_wgmma<COLUMNS, HALVES>(state, probability, ptx::wgmma_descriptor(v_page), factors);
}

template <int DP, int STAGES> __device__ __forceinline__ void prefill_wgmma(const Common& common, const Prefill& p) {
    constexpr int COLUMNS = DP == 256 ? 128 : DP, PARTS = DP / COLUMNS, ROWS = 128, THREADS = 256;
    using R = Ring<DP, COLUMNS, STAGES>;
    DYNAMIC_SHARED(smem);
    __shared__ R ring;
    uint8_t* q_rows = smem + R::BYTES;
    HeadBlocks blocks(p.num_heads, p.num_kv_heads);
    int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, part = blockIdx.x % PARTS;
    if (thread == 0) ring.init();
    __syncthreads();
    ptx::wait_for_previous();
    Tile tile = read_tile(p, blocks.per_group * p.num_kv_heads, blockIdx.x / PARTS);
    if (tile.tokens <= 0) return;
    int pages = tile.end_page - tile.first_page;
    auto fill = [&](int value, int n) {
        if (thread != 0 || n >= pages) return;
        int page = tile.first_page + n;
        const bf16* source = (value ? p.v_layer : p.k_layer) + page_offset<DP>(common, p, blocks, tile, page, value == 0);
        ring.fill(smem, value, n, source, value ? part * (COLUMNS / 64) : 0, min(PAGE_TOKENS, tile.last_position + 1 - page * PAGE_TOKENS));
    };
    for (int n = 0; n < STAGES - 1; n++) {
        fill(0, n);
        fill(1, n);
    }
    load_q<DP, ROWS>(p, tile, blocks, q_rows, thread, THREADS, [](int row, int chunk) { return page_chunk(chunk, row, DP) * 16; });
    ptx::cp_async_commit();
    Rows rows(p, tile, blocks, warp, lane);
    State<COLUMNS> state;
    clear(state);
    // The warpgroup's last row decides what it can skip.
    int last = min(tile.tokens - 1, (thread / 128 * 64 + 63) / blocks.heads(tile.block));
    int end = thread / 128 * 64 / blocks.heads(tile.block) < tile.tokens ? __ldcg(p.positions + tile.token + last) + 1 : 0;
    uint64_t q = ptx::wgmma_descriptor(ptx::shared_address(q_rows + thread / 128 * (64 * 128)));
    ptx::cp_async_wait<0>();
    ptx::fence_async_shared();
    __syncthreads();
    for (int n = 0; n < pages; n++) {
        int page0 = (tile.first_page + n) * PAGE_TOKENS;
        uint8_t *k_page = R::buffer(smem, 0, n), *v_page = R::buffer(smem, 1, n);
        auto k_read = [&] {
            ring.release(0, n, lane);
            fill(1, n + STAGES - 1);
        };
        auto v_ready = [&] {
            ring.wait(1, n);
            if (n < pages - 1 || tile.last_position + 1 == page0 + PAGE_TOKENS) return;
            zero_tokens<COLUMNS>(v_page, tile.last_position + 1 - page0, PAGE_TOKENS, thread, THREADS);
            ptx::fence_async_shared();
            __syncthreads();
        };
        fill(0, n + STAGES - 1);
        ring.wait(0, n);
        if (end > page0 + 64) {
            page_wgmma<DP, COLUMNS, 2>(state, q, ptx::shared_address(k_page), ptx::shared_address(v_page), rows, page0, p.scale_log2, lane, k_read, v_ready);
        } else if (end > page0) {
            page_wgmma<DP, COLUMNS, 1>(state, q, ptx::shared_address(k_page), ptx::shared_address(v_page), rows, page0, p.scale_log2, lane, k_read, v_ready);
        } else {
            k_read();
            v_ready();
        }
        ring.release(1, n, lane);
    }
    store_tile(p, tile, blocks, state, part * COLUMNS, warp, lane);
}
#endif

}  // namespace

#define ATTENTION_PREFILL(DP, ROWS, BODY)                                                                                                          \
    extern "C" __global__ void __launch_bounds__((ROWS) * 2, 1) attention_prefill_d##DP(                                                          \
        const Common common, const bf16* q, const bf16* k_layer, const bf16* v_layer, bf16* out, const int32_t* tiles, const int32_t* positions,  \
        const int32_t* slots, const int32_t* block_tables, int table_width, int num_pages, int num_heads, int num_kv_heads, int head_dim,         \
        int ld_out, float scale_log2, int window) {                                                                                               \
        begin_kernel(common);                                                                                                                     \
        Prefill p = {q,         k_layer,   v_layer,      out,      tiles,  positions,  slots, block_tables,                                       \
                     table_width, num_pages, num_heads, num_kv_heads, head_dim, ld_out, scale_log2, window};                                      \
        BODY(common, p);                                                                                                                          \
    }

// Rows and page buffers of a block: kernels/attention.py knows the same numbers.
ATTENTION_PREFILL(96, 128, (prefill_mma<96, 128>))
#if HAS_WGMMA
ATTENTION_PREFILL(64, 128, (prefill_wgmma<64, 4>))
ATTENTION_PREFILL(128, 128, (prefill_wgmma<128, 3>))
ATTENTION_PREFILL(256, 128, (prefill_wgmma<256, 1>))
#else
ATTENTION_PREFILL(64, 128, (prefill_mma<64, 128>))
ATTENTION_PREFILL(128, 128, (prefill_mma<128, 128>))
ATTENTION_PREFILL(256, 64, (prefill_mma<256, 64>))
#endif
