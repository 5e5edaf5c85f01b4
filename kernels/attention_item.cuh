// Decode attention's work items: finding them, one page of one row for up to 16 heads, the merge of a row's pages.
// attention_decode.cu has the mathematics and the layouts.
#pragma once
#include "attention_core.cuh"

namespace {

using namespace attention;

struct Decode {
    const bf16* q;
    const bf16* k_layer;
    const bf16* v_layer;
    bf16* out;
    float* partial;
    uint32_t* counters;
    const int32_t* page_prefix;
    const int32_t* positions;
    const int32_t* slots;
    const int32_t* block_tables;
    int table_width, num_pages, rows, num_heads, num_kv_heads, head_dim, ld_out;
    float scale_log2;
    int window;
};

struct Item {
    int row;
    int block;      // head block
    int place;      // of this page in page_prefix order
    int row_place;  // of the row's first page
    int pages;      // of the row
    int first, end; // visible keys of this page
    int page;       // index in the pool
};

constexpr int WARPS = 4;
constexpr int COMPUTE_THREADS = WARPS * 32;

// What the warps of a block exchange within an item.
struct Exchange {
    uint4 p[GROUPS * 2][32];      // A fragments of P, 16 keys each
    float2 sums[GROUPS][32];      // each lane's sums of p, rows g and g + 8
    float maxima[GROUPS][16];
    uint4 zeros;                  // q of rows without a head
    int last;                     // whether this block merges
};
constexpr int EXCHANGE_BYTES = 5632;  // kernels/attention.py
static_assert(sizeof(Exchange) <= EXCHANGE_BYTES, "");

// The row of the page at `place`: the largest r with page_prefix[r] <= place.
__device__ __forceinline__ int find_row(const int32_t* page_prefix, int rows, int place) {
    int low = 0, high = rows;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (__ldcg(page_prefix + middle) <= place)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// An item and the metadata that says so.
struct Found {
    Item item;
    int position, slot, table_page;
};

__device__ __forceinline__ Found find_item(const Common& common, const Decode& d, const HeadBlocks& blocks, int num_blocks, int index, bool report) {
    Found found;
    Item& item = found.item;
    item.place = index / num_blocks;
    item.block = index % num_blocks;
    item.row = find_row(d.page_prefix, d.rows, item.place);
    item.row_place = __ldcg(d.page_prefix + item.row);
    item.pages = __ldcg(d.page_prefix + item.row + 1) - item.row_place;
    found.position = __ldcg(d.positions + item.row);
    found.slot = __ldcg(d.slots + item.row);
    int first = d.window > 0 ? max(0, found.position - d.window + 1) : 0, page = max(0, first / PAGE_TOKENS + item.place - item.row_place);
    found.table_page = page;
    item.first = max(0, first - page * PAGE_TOKENS);
    item.end = min(PAGE_TOKENS, found.position - page * PAGE_TOKENS + 1);
    item.page = page_index(common, d.block_tables, d.table_width, d.num_pages, found.slot, page, blocks.first_head(item.block), found.position, report);
    return found;
}

// Whether the metadata still says the same: all loads at once, where find_item's wait for each other.
__device__ __forceinline__ bool still_true(const Decode& d, const Found& found) {
    const Item& item = found.item;
    int in_row = item.place - item.row_place;
    if (item.end <= 0 || in_row < 0 || in_row >= item.pages || found.table_page >= d.table_width) return false;
    int row_place = __ldcg(d.page_prefix + item.row), next_place = __ldcg(d.page_prefix + item.row + 1);
    int position = __ldcg(d.positions + item.row), slot = __ldcg(d.slots + item.row);
    int page = __ldcg(d.block_tables + (int64_t)found.slot * d.table_width + found.table_page);
    return row_place == item.row_place && next_place - row_place == item.pages && position == found.position && slot == found.slot && page == item.page;
}

template <int DP> __device__ __forceinline__ int64_t page_offset(const Decode& d, const HeadBlocks& blocks, const Item& item) {
    return ((int64_t)item.page * d.num_kv_heads + blocks.kv_head(item.block)) * (PAGE_TOKENS * DP);
}

__host__ __device__ constexpr int padded_row(int dp) { return dp * 2 + 16; }  // bytes from one row of q to the next in shared memory

// A fragment of q: rows are the item's heads.
template <int DP> __device__ __forceinline__ void load_q(uint32_t (&a)[4], uint32_t q, uint32_t zeros, int heads, int step, int lane) {
    int row = lane & 15;
    ptx::ldmatrix_x4(a, row < heads ? q + row * padded_row(DP) + (2 * step + (lane >> 4)) * 16 : zeros);
}

// Scores of this warp's 32 keys; invisible ones -inf. Leaves the maxima of its keys for the other warps. WHOLE: all 128 keys
// of the page are visible.
template <int DP, bool WHOLE>
__device__ __forceinline__ void item_scores(float (&t)[16], Exchange& exchange, uint32_t k_page, uint32_t q, int heads, const Item& item, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < 16; i++) t[i] = 0.0f;
    if (WHOLE || (warp * GROUP_KEYS < item.end && (warp + 1) * GROUP_KEYS > item.first)) {
        uint32_t zeros = ptx::shared_address(&exchange.zeros);
#pragma unroll
        for (int step = 0; step < DP / 16; step++) {
            uint32_t a[4];
            load_q<DP>(a, q, zeros, heads, step, lane);
            scores_step<DP, 4>(t, a, k_page, warp * GROUP_KEYS, step, lane);
        }
    }
    if (!WHOLE) mask<4>(t, warp * GROUP_KEYS, lane, item.first, item.end, item.first, item.end);
    float low = MINUS_INFINITY, high = MINUS_INFINITY;
    largest<4>(t, low, high);
    low = quad_max(low);
    high = quad_max(high);
    if ((lane & 3) == 0) {
        exchange.maxima[warp][lane >> 2] = low;
        exchange.maxima[warp][(lane >> 2) + 8] = high;
    }
}

__device__ __forceinline__ float row_maximum(const Exchange& exchange, int row, float scale_log2) {
    return page_maximum(fmaxf(fmaxf(exchange.maxima[0][row], exchange.maxima[1][row]), fmaxf(exchange.maxima[2][row], exchange.maxima[3][row])), scale_log2);
}

// P of this warp's keys, for all warps. Returns m_page of rows g and g + 8.
__device__ __forceinline__ float2 item_probabilities(const float (&t)[16], Exchange& exchange, float scale_log2, int warp, int lane) {
    float2 m = make_float2(row_maximum(exchange, lane >> 2, scale_log2), row_maximum(exchange, (lane >> 2) + 8, scale_log2));
    uint32_t p[2][4];
    float2 sum;
    probabilities(p, sum.x, sum.y, t, m.x == MINUS_INFINITY ? 0.0f : m.x, m.y == MINUS_INFINITY ? 0.0f : m.y, scale_log2);
    exchange.sums[warp][lane] = sum;
#pragma unroll
    for (int half = 0; half < 2; half++) exchange.p[2 * warp + half][lane] = make_uint4(p[half][0], p[half][1], p[half][2], p[half][3]);
    return m;
}

__device__ __forceinline__ float2 item_sum(const Exchange& exchange, int lane) {
    float2 a = exchange.sums[0][lane], b = exchange.sums[1][lane], c = exchange.sums[2][lane], d = exchange.sums[3][lane];
    return make_float2(page_sum(a.x, b.x, c.x, d.x), page_sum(a.y, b.y, c.y, d.y));
}

// o of this warp's quarter of the columns.
template <int DP, bool WHOLE> __device__ __forceinline__ void item_values(float (&o)[DP / 8], const Exchange& exchange, uint32_t v_page, const Item& item, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < DP / 8; i++) o[i] = 0.0f;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        if (!WHOLE && (group * GROUP_KEYS >= item.end || (group + 1) * GROUP_KEYS <= item.first)) continue;
        uint32_t p[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 v = exchange.p[2 * group + half][lane];
            p[half][0] = v.x;
            p[half][1] = v.y;
            p[half][2] = v.z;
            p[half][3] = v.w;
        }
        values_group<DP, DP / 32>(o, p, v_page, group, warp * (DP / 32), lane);
    }
}

__device__ __forceinline__ void store_pair(const Decode& d, int row, int head, int column, float x, float y) {
    if (column < d.head_dim) *reinterpret_cast<uint32_t*>(d.out + (int64_t)row * d.ld_out + head * d.head_dim + column) = ptx::pair_bf16(x, y);
}

template <int DP> __device__ __forceinline__ float* partial_of(const Decode& d, int place, int head) {
    return d.partial + ((int64_t)place * d.num_heads + head) * (DP + 8);
}

template <int DP>
__device__ __forceinline__ void item_store(const Decode& d, const HeadBlocks& blocks, const Item& item, float2 m, float2 l, const float (&o)[DP / 8], int warp, int lane) {
    int heads = blocks.heads(item.block), head0 = blocks.first_head(item.block);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = (lane >> 2) + 8 * half;
        if (row >= heads) continue;
        float row_m = half ? m.y : m.x, row_l = half ? l.y : l.x;
        int column0 = warp * (DP / 4) + (lane & 3) * 2;
        if (item.pages == 1) {
            float inverse_l = inverse(row_l);
#pragma unroll
            for (int tile = 0; tile < DP / 32; tile++)
                store_pair(d, item.row, head0 + row, column0 + tile * 8, finish(o[4 * tile + 2 * half], inverse_l), finish(o[4 * tile + 2 * half + 1], inverse_l));
        } else {
            float* target = partial_of<DP>(d, item.place, head0 + row);
            if (warp == 0 && (lane & 3) == 0) *reinterpret_cast<float2*>(target) = make_float2(row_m, row_l);
#pragma unroll
            for (int tile = 0; tile < DP / 32; tile++)
                *reinterpret_cast<float2*>(target + 8 + column0 + tile * 8) = make_float2(o[4 * tile + 2 * half], o[4 * tile + 2 * half + 1]);
        }
    }
}

// Merges the partial results of a row's pages, ascending. A thread has four columns of a row.
template <int DP> __device__ __forceinline__ void merge_row(const Decode& d, const HeadBlocks& blocks, const Item& item, int thread) {
    constexpr int QUADS = DP / 4, ROWS = COMPUTE_THREADS / QUADS, BATCH = 8;
    int quad = thread % QUADS, heads = blocks.heads(item.block);
    if (thread >= ROWS * QUADS) return;
    for (int r = thread / QUADS; r < heads; r += ROWS) {
        int head = blocks.first_head(item.block) + r;
        float m = MINUS_INFINITY, l = 0.0f;
        float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float* source = partial_of<DP>(d, item.row_place, head);
        int64_t stride = (int64_t)d.num_heads * (DP + 8);
        for (int page0 = 0; page0 < item.pages; page0 += BATCH) {
            float2 page_ml[BATCH];
            float4 page_o[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {  // beyond the last page: the last again, made invisible
                const float* page = source + min(page0 + i, item.pages - 1) * stride;
                page_ml[i] = __ldcg(reinterpret_cast<const float2*>(page));
                page_o[i] = __ldcg(reinterpret_cast<const float4*>(page + 8) + quad);
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                float a, b;
                merge_factors(m, page0 + i < item.pages ? page_ml[i].x : MINUS_INFINITY, a, b);
                l = merged(l, a, page_ml[i].y, b);
                o.x = merged(o.x, a, page_o[i].x, b);
                o.y = merged(o.y, a, page_o[i].y, b);
                o.z = merged(o.z, a, page_o[i].z, b);
                o.w = merged(o.w, a, page_o[i].w, b);
            }
        }
        float inverse_l = inverse(l);
        store_pair(d, item.row, head, 4 * quad, finish(o.x, inverse_l), finish(o.y, inverse_l));
        store_pair(d, item.row, head, 4 * quad + 2, finish(o.z, inverse_l), finish(o.w, inverse_l));
    }
}

}  // namespace
