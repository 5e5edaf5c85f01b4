// Prefill attention's tiles: what they see, softmax of a page of scores, the running result. attention_prefill.cu has the
// mathematics and the layouts.
#pragma once
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
    int num_tiles, table_width, num_pages, num_heads, num_kv_heads, head_dim, ld_out;
    float scale_log2;
    int window;
};

struct Tile {
    int token, tokens;  // first row, number of rows; consecutive positions of one sequence
    int block;          // head block
    int slot, first_position, last_position;
    int first_page, pages;
};

// The first position that a token at `position` sees.
__device__ __forceinline__ int first_visible(const Prefill& p, int position) { return p.window > 0 ? max(0, position - p.window + 1) : 0; }

__device__ __forceinline__ Tile read_tile(const Prefill& p, int num_blocks, int index) {
    Tile tile = {};
    int i = index / num_blocks;
    tile.block = index % num_blocks;
    tile.token = __ldcg(p.tiles + 2 * i);
    tile.tokens = __ldcg(p.tiles + 2 * i + 1);
    if (tile.tokens <= 0) return tile;
    tile.slot = __ldcg(p.slots + tile.token);
    tile.first_position = __ldcg(p.positions + tile.token);
    tile.last_position = tile.first_position + tile.tokens - 1;
    tile.first_page = first_visible(p, tile.first_position) / PAGE_TOKENS;
    tile.pages = tile.last_position / PAGE_TOKENS + 1 - tile.first_page;
    return tile;
}

// Tokens of page number n of the tile that it needs: up to this one.
__device__ __forceinline__ int page_end(const Tile& tile, int n) { return min(PAGE_TOKENS, tile.last_position + 1 - (tile.first_page + n) * PAGE_TOKENS); }

// A warp's 16 rows: those of this lane (g and g + 8), and what all rows, or any row, can see. Positions [first, end).
struct Rows {
    int first[2], end[2];    // no such row: [0, 0)
    int any_first, any_end;  // outside: visible to no row
    int all_first, all_end;  // inside: visible to every row

    __device__ __forceinline__ Rows(const Prefill& p, const Tile& tile, const HeadBlocks& blocks, int warp, int lane) {
        int heads = blocks.heads(tile.block), low = warp * 16 / heads, high = (warp * 16 + 15) / heads;  // tokens
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int token = (warp * 16 + (lane >> 2) + 8 * half) / heads;
            first[half] = token < tile.tokens ? first_visible(p, tile.first_position + token) : 0;
            end[half] = token < tile.tokens ? tile.first_position + token + 1 : 0;
        }
        any_first = first_visible(p, tile.first_position + low);
        all_first = first_visible(p, tile.first_position + high);
        any_end = low < tile.tokens ? tile.first_position + min(high, tile.tokens - 1) + 1 : 0;
        all_end = high < tile.tokens ? tile.first_position + low + 1 : 0;
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
        int heads = blocks.heads(tile.block), row = warp * 16 + (lane >> 2) + 8 * half, token = row / heads;
        if (token >= tile.tokens) continue;
        float inverse_l = inverse(state.l[half]);
        bf16* target = p.out + (int64_t)(tile.token + token) * p.ld_out + (blocks.first_head(tile.block) + row % heads) * p.head_dim;
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
#pragma unroll 1
    for (int i = thread; i < ROWS * (DP / 8); i += threads) {
        int row = i / (DP / 8), chunk = i % (DP / 8), token = row / heads;
        bool there = token < tile.tokens;
        const bf16* source = p.q + ((int64_t)(tile.token + (there ? token : 0)) * p.num_heads + blocks.first_head(tile.block) + row % heads) * DP + chunk * 8;
        ptx::cp_async_16(ptx::shared_address(q_rows + place(row, chunk)), source, there ? 16 : 0);
    }
}

template <int DP> __device__ __forceinline__ int64_t page_offset(const Common& common, const Prefill& p, const HeadBlocks& blocks, const Tile& tile, int n, bool report) {
    int64_t index = page_index(common, p.block_tables, p.table_width, p.num_pages, tile.slot, tile.first_page + n, blocks.first_head(tile.block), tile.last_position, report);
    return (index * p.num_kv_heads + blocks.kv_head(tile.block)) * (PAGE_TOKENS * DP);
}

}  // namespace
