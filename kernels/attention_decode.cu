// Attention of decode rows: one query token a row against its KV pages. The arithmetic is attention_core.cuh's.
//
//   out[row][h * D + d] = sum_k softmax_k(q[row][h] . K[k] / sqrt(D)) V[k][d], k over the row's visible positions
//
// Work item = (row, visible page, head block); item i = (its place in page_prefix) * head blocks + head block. A fixed
// grid of blocks takes items blockIdx.x, + gridDim.x ..., so that a captured graph serves any lengths. Four warps compute
// an item: each 32 of the page's keys for the scores, then a quarter of the columns for P.V. With several visible pages
// each item leaves (m, l, o) in `partial`, and the block that counts itself last for its (row, head block) merges them.
//
// q (T, Hq, Dp) bf16; k_layer, v_layer: common.cuh, "layouts"; out bf16 row-major (T, ld_out). partial: for each visible
// page and query head Dp + 8 floats: m, l, 6 unused, o[Dp]; engine side: kernels/attention.py:partial_bytes. counters:
// zero before the first launch, (rows, head blocks); every launch leaves them zero.
//
// sm_90a: a fifth warp finds items and copies K, V and q by bulk copies into a ring of page buffers, 2 blocks on a
// multiprocessor. Elsewhere: cp.async by all threads, one item at a time.
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

// Scores of this warp's 32 keys; invisible ones -inf. Leaves the maxima of its keys for the other warps.
template <int DP>
__device__ __forceinline__ void item_scores(float (&t)[16], Exchange& exchange, uint32_t k_page, uint32_t q, int heads, const Item& item, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < 16; i++) t[i] = 0.0f;
    if (warp * GROUP_KEYS < item.end && (warp + 1) * GROUP_KEYS > item.first) {
        uint32_t zeros = ptx::shared_address(&exchange.zeros);
#pragma unroll
        for (int step = 0; step < DP / 16; step++) {
            uint32_t a[4];
            load_q<DP>(a, q, zeros, heads, step, lane);
            scores_step<DP, 4>(t, a, k_page, warp * GROUP_KEYS, step, lane);
        }
    }
    mask<4>(t, warp * GROUP_KEYS, lane, item.first, item.end, item.first, item.end);
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
template <int DP> __device__ __forceinline__ void item_values(float (&o)[DP / 8], const Exchange& exchange, uint32_t v_page, const Item& item, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < DP / 8; i++) o[i] = 0.0f;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        if (group * GROUP_KEYS >= item.end || (group + 1) * GROUP_KEYS <= item.first) continue;
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
        for (int page0 = 0; page0 < item.pages; page0 += BATCH) {
            float2 page_ml[BATCH];
            float4 page_o[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                if (page0 + i >= item.pages) continue;
                const float* source = partial_of<DP>(d, item.row_place + page0 + i, head);
                page_ml[i] = __ldcg(reinterpret_cast<const float2*>(source));
                page_o[i] = __ldcg(reinterpret_cast<const float4*>(source + 8) + quad);
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                if (page0 + i >= item.pages) continue;
                float a, b;
                merge_factors(m, page_ml[i].x, a, b);
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

// After item_store of all computing threads: the last block of (row, head block) merges.
template <int DP> __device__ __forceinline__ void finish_item(const Decode& d, const HeadBlocks& blocks, int num_blocks, const Item& item, Exchange& exchange, int thread) {
    if (item.pages == 1) return;
    ptx::named_barrier(1, COMPUTE_THREADS);
    if (thread == 0) {
        uint32_t* counter = d.counters + (int64_t)item.row * num_blocks + item.block;
        exchange.last = ptx::atomic_add_ordered(counter, 1u) == (uint32_t)item.pages - 1;
        if (exchange.last) *counter = 0;
    }
    ptx::named_barrier(1, COMPUTE_THREADS);
    if (exchange.last) merge_row<DP>(d, blocks, item, thread);
}

#if HAS_WGMMA  // sm_90a

template <int DP, int STAGES> struct Ring {
    static constexpr int PAGE_BYTES = PAGE_TOKENS * DP * 2;
    static constexpr int Q_BYTES = 16 * padded_row(DP);
    static constexpr int Q_SLOTS = (STAGES + 1) / 2;  // K of item n + Q_SLOTS is not copied before K of item n was read
};

// The fifth warp: finds this block's items, 32 at a time, one a lane, and fills the ring with K (and q), V, K (and q), V ...
template <int DP, int STAGES>
__device__ __forceinline__ void produce(const Common& common, const Decode& d, const HeadBlocks& blocks, int num_blocks, uint8_t* pages, uint8_t* q_rows, Item* items,
                                        uint64_t* full, uint64_t* empty, int lane) {
    using R = Ring<DP, STAGES>;
    using P = Panels<DP>;
    // While the kernels before us end: finds the first items and asks for their K and V in L2. The metadata may still be
    // another step's: a prefetch from a wrong page is only wasted, and each item is checked again.
    int index = blockIdx.x + lane * gridDim.x;
    Found found = {};
    if (index < __ldcg(d.page_prefix + d.rows) * num_blocks) {
        found = find_item(common, d, blocks, num_blocks, index, false);
        int64_t offset = page_offset<DP>(d, blocks, found.item);
        if (lane < (STAGES + 1) / 2 && found.item.end > 0)
            for (int i = 0; i < 2 * P::COUNT; i++)
                ptx::bulk_prefetch_l2((i & 1 ? d.v_layer : d.k_layer) + offset + (i >> 1) * (P::PANEL_BYTES / 2), found.item.end * P::ROW_BYTES);
    }
    ptx::wait_for_previous();
    int stage = 0, parity = 1, q_slot = 0;
    bool known = still_true(d, found);
    int total = __ldcg(d.page_prefix + d.rows) * num_blocks;
    while (true) {
        bool wanted = index < total;
        if (wanted && !known) found = find_item(common, d, blocks, num_blocks, index, true);
        const Item& item = found.item;
        int from = item.first / GROUP_KEYS * GROUP_KEYS, bytes = (item.end - from) * P::ROW_BYTES, heads = blocks.heads(item.block);
        int64_t offset = page_offset<DP>(d, blocks, item);
        const bf16* q = d.q + ((int64_t)item.row * d.num_heads + blocks.first_head(item.block)) * DP;
        int count = __popc(__ballot_sync(0xFFFFFFFFu, wanted));
        for (int n = 0; n < count; n++) {
            for (int value = 0; value < 2; value++) {
                if (lane == n) {
                    ptx::mbarrier_wait(&empty[stage], parity);
                    if (value == 0) items[stage] = item;
                    ptx::mbarrier_arrive_expect(&full[stage], bytes * P::COUNT + (value == 0 ? heads * DP * 2 : 0));
                    if (value == 0)
                        for (int h = 0; h < heads; h++) ptx::bulk_copy(q_rows + q_slot * R::Q_BYTES + h * padded_row(DP), q + h * DP, DP * 2, &full[stage]);
#pragma unroll
                    for (int panel = 0; panel < P::COUNT; panel++) {
                        int place = panel * P::PANEL_BYTES + from * P::ROW_BYTES;
                        ptx::bulk_copy(pages + stage * R::PAGE_BYTES + place, (value ? d.v_layer : d.k_layer) + offset + place / 2, bytes, &full[stage]);
                    }
                }
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                parity ^= stage == 0;
                __syncwarp();
            }
            q_slot = q_slot + 1 == R::Q_SLOTS ? 0 : q_slot + 1;
        }
        if (count < 32) break;
        index += 32 * gridDim.x;
        known = false;
    }
}

template <int DP, int STAGES>
__device__ __forceinline__ void consume(const Decode& d, const HeadBlocks& blocks, int num_blocks, uint8_t* pages, uint8_t* q_rows, const Item* items, uint64_t* full, uint64_t* empty,
                                        Exchange& exchange, int warp, int lane) {
    using R = Ring<DP, STAGES>;
    ptx::wait_for_previous();
    int stage = 0, parity = 0, q_slot = 0, thread = warp * 32 + lane;
    int total = __ldcg(d.page_prefix + d.rows) * num_blocks;
    for (int index = blockIdx.x; index < total; index += gridDim.x) {
        ptx::mbarrier_wait(&full[stage], parity);
        Item item = items[stage];
        float t[16], o[DP / 8];
        item_scores<DP>(t, exchange, ptx::shared_address(pages + stage * R::PAGE_BYTES), ptx::shared_address(q_rows + q_slot * R::Q_BYTES), blocks.heads(item.block), item, warp, lane);
        q_slot = q_slot + 1 == R::Q_SLOTS ? 0 : q_slot + 1;
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&empty[stage]);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        parity ^= stage == 0;
        ptx::named_barrier(1, COMPUTE_THREADS);
        float2 m = item_probabilities(t, exchange, d.scale_log2, warp, lane);
        uint8_t* v_page = pages + stage * R::PAGE_BYTES;
        ptx::mbarrier_wait(&full[stage], parity);
        if (item.end % GROUP_KEYS != 0) {
            zero_tokens<DP>(v_page, item.end, group_end(item.end), thread, COMPUTE_THREADS);
            ptx::fence_async_shared();  // a bulk copy overwrites the zeros later
        }
        ptx::named_barrier(1, COMPUTE_THREADS);
        float2 l = item_sum(exchange, lane);
        item_values<DP>(o, exchange, ptx::shared_address(v_page), item, warp, lane);
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&empty[stage]);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        parity ^= stage == 0;
        item_store<DP>(d, blocks, item, m, l, o, warp, lane);
        finish_item<DP>(d, blocks, num_blocks, item, exchange, thread);
    }
}

template <int DP, int STAGES> __device__ __forceinline__ void decode(const Common& common, const Decode& d) {
    using R = Ring<DP, STAGES>;
    DYNAMIC_SHARED(smem);
    __shared__ Item items[STAGES];
    __shared__ uint64_t full[STAGES], empty[STAGES];
    Exchange& exchange = *reinterpret_cast<Exchange*>(smem + STAGES * R::PAGE_BYTES);
    uint8_t* q_rows = smem + STAGES * R::PAGE_BYTES + EXCHANGE_BYTES;
    HeadBlocks blocks(d.num_heads, d.num_kv_heads);
    int num_blocks = blocks.per_group * d.num_kv_heads, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            ptx::mbarrier_init(&full[i], 1);
            ptx::mbarrier_init(&empty[i], WARPS);
        }
        ptx::mbarrier_fence_init();
        exchange.zeros = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    if (warp == WARPS)
        produce<DP, STAGES>(common, d, blocks, num_blocks, smem, q_rows, items, full, empty, lane);
    else
        consume<DP, STAGES>(d, blocks, num_blocks, smem, q_rows, items, full, empty, exchange, warp, lane);
}

#else

template <int DP, int STAGES> __device__ __forceinline__ void decode(const Common& common, const Decode& d) {
    constexpr int PAGE_BYTES = PAGE_TOKENS * DP * 2;
    constexpr int V_OFFSET = DP == 256 ? 0 : PAGE_BYTES;  // with 256 columns V takes the place of K: 99 KB is all that sm_86 has
    DYNAMIC_SHARED(smem);
    uint8_t *v_page = smem + V_OFFSET, *q_rows = smem + V_OFFSET + PAGE_BYTES + EXCHANGE_BYTES;
    Exchange& exchange = *reinterpret_cast<Exchange*>(smem + V_OFFSET + PAGE_BYTES);
    HeadBlocks blocks(d.num_heads, d.num_kv_heads);
    int num_blocks = blocks.per_group * d.num_kv_heads, thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    if (thread == 0) exchange.zeros = make_uint4(0, 0, 0, 0);
    ptx::wait_for_previous();
    int total = __ldcg(d.page_prefix + d.rows) * num_blocks;
    for (int index = blockIdx.x; index < total; index += gridDim.x) {
        Item item = find_item(common, d, blocks, num_blocks, index, thread == 0).item;
        int from = item.first / GROUP_KEYS * GROUP_KEYS, heads = blocks.heads(item.block);
        int64_t offset = page_offset<DP>(d, blocks, item);
        const bf16* q = d.q + ((int64_t)item.row * d.num_heads + blocks.first_head(item.block)) * DP;
        for (int i = thread; i < heads * (DP / 8); i += COMPUTE_THREADS)
            ptx::cp_async_16(ptx::shared_address(q_rows + i / (DP / 8) * padded_row(DP) + i % (DP / 8) * 16), q + i * 8);
        load_tokens<DP>(smem, d.k_layer + offset, from, item.end, thread, COMPUTE_THREADS);
        ptx::cp_async_commit();
        if (V_OFFSET != 0) {
            load_tokens<DP>(v_page, d.v_layer + offset, from, item.end, thread, COMPUTE_THREADS);
            ptx::cp_async_commit();
            ptx::cp_async_wait<1>();
        } else {
            ptx::cp_async_wait<0>();
        }
        __syncthreads();
        float t[16], o[DP / 8];
        item_scores<DP>(t, exchange, ptx::shared_address(smem), ptx::shared_address(q_rows), heads, item, warp, lane);
        __syncthreads();
        if (V_OFFSET == 0) load_tokens<DP>(v_page, d.v_layer + offset, from, item.end, thread, COMPUTE_THREADS);
        ptx::cp_async_commit();
        float2 m = item_probabilities(t, exchange, d.scale_log2, warp, lane);
        ptx::cp_async_wait<0>();
        zero_tokens<DP>(v_page, item.end, group_end(item.end), thread, COMPUTE_THREADS);
        __syncthreads();
        float2 l = item_sum(exchange, lane);
        item_values<DP>(o, exchange, ptx::shared_address(v_page), item, warp, lane);
        item_store<DP>(d, blocks, item, m, l, o, warp, lane);
        finish_item<DP>(d, blocks, num_blocks, item, exchange, thread);
        __syncthreads();
    }
}

#endif

}  // namespace

#if HAS_WGMMA  // sm_90a
#define DECODE_THREADS (COMPUTE_THREADS + 32)
#else
#define DECODE_THREADS COMPUTE_THREADS
#endif

#define ATTENTION_DECODE(DP, STAGES, BLOCKS)                                                                                                          \
    extern "C" __global__ void __launch_bounds__(DECODE_THREADS, BLOCKS) attention_decode_d##DP(                                                      \
        const Common common, const bf16* q, const bf16* k_layer, const bf16* v_layer, bf16* out, float* partial, uint32_t* counters,                  \
        const int32_t* page_prefix, const int32_t* positions, const int32_t* slots, const int32_t* block_tables, int table_width, int num_pages,       \
        int rows, int num_heads, int num_kv_heads, int head_dim, int ld_out, float scale_log2, int window) {                                          \
        begin_kernel(common);                                                                                                                         \
        Decode d = {q,         k_layer,   v_layer, out,       partial,      counters, page_prefix, positions,  slots, block_tables,                    \
                    table_width, num_pages, rows,    num_heads, num_kv_heads, head_dim, ld_out,      scale_log2, window};                              \
        decode<DP, STAGES>(common, d);                                                                                                                \
    }

// Page buffers a block, blocks a multiprocessor: kernels/attention.py knows the same numbers.
#ifndef DECODE_STAGES_128
#define DECODE_STAGES_128 3
#define DECODE_BLOCKS_128 2
#endif
ATTENTION_DECODE(64, 6, 2)
ATTENTION_DECODE(96, 4, 2)
ATTENTION_DECODE(128, DECODE_STAGES_128, DECODE_BLOCKS_128)
ATTENTION_DECODE(256, 3, 1)
