// Attention of prefill rows: a tile of query tokens of one sequence against its KV pages, causal. The arithmetic is
// attention_core.cuh's, so a token's output has the bits that decode would give it.
//
//   out[t][h * D + d] = sum_k softmax_k(q[t][h] . K[k] / sqrt(D)) V[k][d], k over the positions visible to token t
//
// Block = (tile, head block): its rows are the tile's tokens times the heads that share a KV head (token-major), 16 rows
// a warp, so that K and V of a page are read once for all of them. A warp holds the page's 16 x 128 scores, then the
// page's o and the merged o in registers. tiles (num_tiles, 2): first token row, number of tokens; rows of one sequence in
// ascending positions, tokens * min(16, Hq / Hkv) <= rows of a block (kernels/attention.py:tile_tokens). Longest tiles
// first. head_dim 256 takes two blocks, each computing the scores and half of the columns of V.
//
// q (T, Hq, Dp) bf16; k_layer, v_layer: common.cuh, "layouts"; out bf16 row-major (T, ld_out).
// sm_90a: pages arrive in a ring of buffers by bulk copies. Elsewhere: cp.async by all threads, one page at a time.
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

__host__ __device__ constexpr int padded_row(int dp) { return dp * 2 + 16; }  // bytes from one row of q to the next in shared memory

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
    int first[2], end[2];
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

// q of the tile to shared memory, zeros for rows that are not there.
template <int DP, int ROWS> __device__ __forceinline__ void load_q(const Prefill& p, const Tile& tile, const HeadBlocks& blocks, uint8_t* q_rows, int thread, int threads) {
    int heads = blocks.heads(tile.block);
    for (int i = thread; i < ROWS * (DP / 8); i += threads) {
        int row = i / (DP / 8), chunk = i % (DP / 8), token = row / heads;
        bool there = token < tile.tokens;
        const bf16* source = p.q + ((int64_t)(tile.token + (there ? token : 0)) * p.num_heads + blocks.first_head(tile.block) + row % heads) * DP + chunk * 8;
        ptx::cp_async_16(ptx::shared_address(q_rows + row * padded_row(DP) + chunk * 16), source, there ? 16 : 0);
    }
    ptx::cp_async_commit();
}

// Scores of a warp's rows with the keys of a page's groups [group0, group1), by halves of a page; elsewhere -inf or more scores.
template <int DP> __device__ __forceinline__ void tile_scores(float (&t)[2][8][4], uint32_t k_page, uint32_t q, int group0, int group1, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        bool wanted = 2 * half < group1 && 2 * half + 2 > group0;
#pragma unroll
        for (int i = 0; i < 32; i++) t[half][i / 4][i % 4] = wanted ? 0.0f : MINUS_INFINITY;
        if (!wanted) continue;
#pragma unroll
        for (int step = 0; step < DP / 16; step++) {
            uint32_t a[4];
            ptx::ldmatrix_x4(a, q + (lane & 15) * padded_row(DP) + (2 * step + (lane >> 4)) * 16);
            scores_step<DP, 8>(t[half], a, k_page, half * 64, step, lane);
        }
    }
}

// The running result of a warp's 16 rows, COLUMNS of V.
template <int COLUMNS> struct State {
    float m[2], l[2];
    float o[COLUMNS / 8][4];
};

// One page for one warp: scores, softmax, P.V, merge. `page0`: position of the page's first key. k_done() is called after
// the last read of K; v_ready() returns when V is in shared memory.
template <int DP, int COLUMNS, class KDone, class VReady>
__device__ __forceinline__ void tile_page(State<COLUMNS>& state, uint32_t k_page, uint32_t v_page, uint32_t q, int chunk0, const Rows& rows, int page0, float scale_log2, int lane,
                                          KDone k_done, VReady v_ready) {
    int group0 = max(0, rows.any_first - page0) / GROUP_KEYS, group1 = min(GROUPS, (max(0, rows.any_end - page0) + GROUP_KEYS - 1) / GROUP_KEYS);
    if (group0 >= group1) {
        k_done();
        v_ready();
        return;
    }
    float t[2][8][4];
    tile_scores<DP>(t, k_page, q, group0, group1, lane);
    k_done();
    float largest_low = MINUS_INFINITY, largest_high = MINUS_INFINITY;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int key0 = page0 + half * 64;
        if (key0 < rows.all_first || key0 + 64 > rows.all_end) mask<8>(t[half], key0, lane, rows.first[0], rows.end[0], rows.first[1], rows.end[1]);
        largest<8>(t[half], largest_low, largest_high);
    }
    float m_low = page_maximum(quad_max(largest_low), scale_log2), m_high = page_maximum(quad_max(largest_high), scale_log2);
    float base_low = m_low == MINUS_INFINITY ? 0.0f : m_low, base_high = m_high == MINUS_INFINITY ? 0.0f : m_high;
    uint32_t p[GROUPS][2][4];
    float sums[2][GROUPS];
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
        probabilities(p[group], sums[0][group], sums[1][group], &t[group / 2][group % 2 * 4][0], base_low, base_high, scale_log2);
    float l_low = page_sum(sums[0][0], sums[0][1], sums[0][2], sums[0][3]), l_high = page_sum(sums[1][0], sums[1][1], sums[1][2], sums[1][3]);
    v_ready();
    float a_low, b_low, a_high, b_high;
    merge_factors(state.m[0], m_low, a_low, b_low);
    merge_factors(state.m[1], m_high, a_high, b_high);
    state.l[0] = merged(state.l[0], a_low, l_low, b_low);
    state.l[1] = merged(state.l[1], a_high, l_high, b_high);
    constexpr int TILES = COLUMNS % 64 == 0 ? 8 : 6;  // so many columns at a time that registers suffice
#pragma unroll
    for (int tile0 = 0; tile0 < COLUMNS / 8; tile0 += TILES) {
        float o[TILES][4];
#pragma unroll
        for (int i = 0; i < TILES * 4; i++) o[i / 4][i % 4] = 0.0f;
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
            if (group >= group0 && group < group1) values_group<DP, TILES>(o, p[group], v_page, group, chunk0 + tile0, lane);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            float* old = state.o[tile0 + i];
            old[0] = merged(old[0], a_low, o[i][0], b_low);
            old[1] = merged(old[1], a_low, o[i][1], b_low);
            old[2] = merged(old[2], a_high, o[i][2], b_high);
            old[3] = merged(old[3], a_high, o[i][3], b_high);
        }
    }
}

template <int COLUMNS> __device__ __forceinline__ void clear(State<COLUMNS>& state) {
    state.m[0] = state.m[1] = MINUS_INFINITY;
    state.l[0] = state.l[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) state.o[i / 4][i % 4] = 0.0f;
}

template <int COLUMNS> __device__ __forceinline__ void tile_store(const Prefill& p, const Tile& tile, const HeadBlocks& blocks, const State<COLUMNS>& state, int column0, int warp, int lane) {
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
                *reinterpret_cast<uint32_t*>(target + column) = ptx::pair_bf16(finish(state.o[i][2 * half], inverse_l), finish(state.o[i][2 * half + 1], inverse_l));
        }
    }
}

template <int DP, int ROWS> struct Shape {
    static constexpr int PAGE_BYTES = PAGE_TOKENS * DP * 2;
    static constexpr int COLUMNS = DP == 256 ? 128 : DP;  // of V, a block
    static constexpr int PARTS = DP / COLUMNS;
    static constexpr int WARPS = ROWS / 16;
};

// The tokens of a page that the tile needs: [from, end).
__device__ __forceinline__ void needed(const Prefill& p, const Tile& tile, int page, int& from, int& end) {
    int first = p.window > 0 ? max(0, tile.first_position - p.window + 1) : 0;
    from = max(0, first - page * PAGE_TOKENS) / GROUP_KEYS * GROUP_KEYS;
    end = min(PAGE_TOKENS, tile.last_position + 1 - page * PAGE_TOKENS);
}

template <int DP> __device__ __forceinline__ int64_t page_offset(const Common& common, const Prefill& p, const HeadBlocks& blocks, const Tile& tile, int page, int token, bool report) {
    int64_t index = page_index(common, p.block_tables, p.table_width, p.num_pages, tile.slot, page, blocks.first_head(tile.block), tile.last_position, report);
    return ((index * p.num_kv_heads + blocks.kv_head(tile.block)) * PAGE_TOKENS + token) * DP;
}

// Zeroes V from `end` to the end of its group of 32 keys.
template <int DP> __device__ __forceinline__ void zero_tail(uint8_t* v_page, int end, int thread, int threads) {
    int from = end * (DP / 8), to = (end + GROUP_KEYS - 1) / GROUP_KEYS * GROUP_KEYS * (DP / 8);
    for (int i = from + thread; i < to; i += threads) reinterpret_cast<uint4*>(v_page)[i] = make_uint4(0, 0, 0, 0);
}

#if HAS_WGMMA  // sm_90a

// The ring of page buffers, filled in the order K, V, K, V ... by one thread, which also computes: a 9th warp would leave
// 168 registers a thread.
template <int DP, int ROWS, int STAGES> struct Ring {
    uint8_t* pages;
    uint64_t *full, *empty;
    const bf16 *k, *v;  // of the page to be copied next, from the first needed token on
    int issued;         // buffers filled so far
    int page, from, bytes;

    __device__ __forceinline__ void find(const Common& common, const Prefill& p, const HeadBlocks& blocks, const Tile& tile) {
        if (page >= tile.end_page) return;
        int end;
        needed(p, tile, page, from, end);
        bytes = (end - from) * DP * 2;
        int64_t offset = page_offset<DP>(common, p, blocks, tile, page, from, true);
        k = p.k_layer + offset;
        v = p.v_layer + offset;
    }
    // Fills the next buffer, as soon as all warps have read what was in it.
    __device__ __forceinline__ void issue(const Common& common, const Prefill& p, const HeadBlocks& blocks, const Tile& tile) {
        if (page >= tile.end_page) return;
        int stage = issued % STAGES;
        ptx::mbarrier_wait(&empty[stage], issued / STAGES % 2 ^ 1);
        ptx::mbarrier_arrive_expect(&full[stage], bytes);
        ptx::bulk_copy(pages + stage * Shape<DP, ROWS>::PAGE_BYTES + from * DP * 2, issued % 2 ? v : k, bytes, &full[stage]);
        issued++;
        if (issued % 2 != 0) return;
        page++;
        find(common, p, blocks, tile);
    }
};

template <int DP, int ROWS, int STAGES> __device__ __forceinline__ void prefill(const Common& common, const Prefill& p) {
    using S = Shape<DP, ROWS>;
    constexpr int THREADS = S::WARPS * 32;
    DYNAMIC_SHARED(smem);
    __shared__ uint64_t full[STAGES], empty[STAGES];
    uint8_t* q_rows = smem + STAGES * S::PAGE_BYTES;
    HeadBlocks blocks(p.num_heads, p.num_kv_heads);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, thread = threadIdx.x, part = blockIdx.x % S::PARTS;
    if (thread == 0) {
        for (int i = 0; i < STAGES; i++) {
            ptx::mbarrier_init(&full[i], 1);
            ptx::mbarrier_init(&empty[i], S::WARPS);
        }
        ptx::mbarrier_fence_init();
    }
    __syncthreads();
    ptx::wait_for_previous();
    Tile tile = read_tile(p, blocks.per_group * p.num_kv_heads, blockIdx.x / S::PARTS);
    if (tile.tokens <= 0) return;
    __shared__ Ring<DP, ROWS, STAGES> ring;  // thread 0's; in shared memory to spare registers
    if (thread == 0) {
        ring = {smem, full, empty, nullptr, nullptr, 0, tile.first_page, 0, 0};
        ring.find(common, p, blocks, tile);
        for (int i = 0; i < STAGES - 2; i++) ring.issue(common, p, blocks, tile);
    }
    load_q<DP, ROWS>(p, tile, blocks, q_rows, thread, THREADS);
    Rows rows(p, tile, blocks, warp, lane);
    State<S::COLUMNS> state;
    clear(state);
    ptx::cp_async_wait<0>();
    __syncthreads();
    uint32_t q = ptx::shared_address(q_rows + warp * 16 * padded_row(DP));
    int stage = 0, parity = 0;
    for (int page = tile.first_page; page < tile.end_page; page++) {
        int k_stage = stage, v_stage = stage + 1 == STAGES ? 0 : stage + 1;
        int v_parity = parity ^ (v_stage == 0);
        uint8_t* v_page = smem + v_stage * S::PAGE_BYTES;
        if (thread == 0) ring.issue(common, p, blocks, tile);
        ptx::mbarrier_wait(&full[k_stage], parity);
        tile_page<DP, S::COLUMNS>(
            state, ptx::shared_address(smem + k_stage * S::PAGE_BYTES), ptx::shared_address(v_page), q, part * (S::COLUMNS / 8), rows, page * PAGE_TOKENS, p.scale_log2, lane,
            [&] {
                __syncwarp();
                if (lane == 0) ptx::mbarrier_arrive(&empty[k_stage]);
                if (thread == 0) ring.issue(common, p, blocks, tile);
            },
            [&] {
                ptx::mbarrier_wait(&full[v_stage], v_parity);
                if (page == tile.end_page - 1 && (tile.last_position + 1) % GROUP_KEYS != 0) {
                    zero_tail<DP>(v_page, tile.last_position + 1 - page * PAGE_TOKENS, thread, THREADS);
                    __syncthreads();
                }
            });
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&empty[v_stage]);
        stage = v_stage + 1 == STAGES ? 0 : v_stage + 1;
        parity = v_parity ^ (stage == 0);
    }
    tile_store(p, tile, blocks, state, part * S::COLUMNS, warp, lane);
}

#else

template <int DP, int ROWS, int STAGES> __device__ __forceinline__ void prefill(const Common& common, const Prefill& p) {
    using S = Shape<DP, ROWS>;
    constexpr int THREADS = S::WARPS * 32;
    constexpr int V_OFFSET = DP == 256 ? 0 : S::PAGE_BYTES;  // with 256 columns V takes the place of K: 99 KB is all that sm_86 has
    DYNAMIC_SHARED(smem);
    uint8_t *v_page = smem + V_OFFSET, *q_rows = smem + V_OFFSET + S::PAGE_BYTES;
    HeadBlocks blocks(p.num_heads, p.num_kv_heads);
    int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, part = blockIdx.x % S::PARTS;
    ptx::wait_for_previous();
    Tile tile = read_tile(p, blocks.per_group * p.num_kv_heads, blockIdx.x / S::PARTS);
    if (tile.tokens <= 0) return;
    load_q<DP, ROWS>(p, tile, blocks, q_rows, thread, THREADS);
    Rows rows(p, tile, blocks, warp, lane);
    State<S::COLUMNS> state;
    clear(state);
    uint32_t q = ptx::shared_address(q_rows + warp * 16 * padded_row(DP));
    for (int page = tile.first_page; page < tile.end_page; page++) {
        int from, end;
        needed(p, tile, page, from, end);
        int64_t offset = page_offset<DP>(common, p, blocks, tile, page, 0, thread == 0);
        auto load = [&](uint8_t* target, const bf16* source) {
            for (int i = from * (DP / 8) + thread; i < end * (DP / 8); i += THREADS) ptx::cp_async_16(ptx::shared_address(target + i * 16), source + i * 8);
            ptx::cp_async_commit();
        };
        load(smem, p.k_layer + offset);
        if (V_OFFSET != 0) {
            load(v_page, p.v_layer + offset);
            ptx::cp_async_wait<1>();
        } else {
            ptx::cp_async_wait<0>();
        }
        __syncthreads();
        tile_page<DP, S::COLUMNS>(
            state, ptx::shared_address(smem), ptx::shared_address(v_page), q, part * (S::COLUMNS / 8), rows, page * PAGE_TOKENS, p.scale_log2, lane,
            [&] {
                if (V_OFFSET != 0) return;
                __syncthreads();
                load(v_page, p.v_layer + offset);
            },
            [&] {
                ptx::cp_async_wait<0>();
                if (end % GROUP_KEYS != 0) zero_tail<DP>(v_page, end, thread, THREADS);
                __syncthreads();
            });
        __syncthreads();
    }
    tile_store(p, tile, blocks, state, part * S::COLUMNS, warp, lane);
}

#endif

}  // namespace

#define ATTENTION_PREFILL(DP, ROWS, STAGES)                                                                                                        \
    extern "C" __global__ void __launch_bounds__((ROWS) * 2, 1) attention_prefill_d##DP(                                               \
        const Common common, const bf16* q, const bf16* k_layer, const bf16* v_layer, bf16* out, const int32_t* tiles, const int32_t* positions,  \
        const int32_t* slots, const int32_t* block_tables, int table_width, int num_pages, int num_heads, int num_kv_heads, int head_dim,         \
        int ld_out, float scale_log2, int window) {                                                                                               \
        begin_kernel(common);                                                                                                                     \
        Prefill p = {q,         k_layer,   v_layer,      out,      tiles,  positions,  slots, block_tables,                                       \
                     table_width, num_pages, num_heads, num_kv_heads, head_dim, ld_out, scale_log2, window};                                      \
        prefill<DP, ROWS, STAGES>(common, p);                                                                                                     \
    }

// Rows and page buffers of a block: kernels/attention.py knows the same numbers.
ATTENTION_PREFILL(64, 128, 6)
ATTENTION_PREFILL(96, 128, 6)
ATTENTION_PREFILL(128, 128, 5)
#if HAS_WGMMA  // sm_90a
ATTENTION_PREFILL(256, 128, 2)
#else
ATTENTION_PREFILL(256, 64, 1)
#endif
