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
// Keys before a row's own position must have been written before the first launch of the step began (on sm_90a they are
// copied while kernels of this step still run): that launch is not `dependent`.
//
// sm_90a: one more warp copies K, V and q by bulk copies into a ring of page buffers, 2 blocks on a multiprocessor.
// Elsewhere: cp.async by all threads, one item at a time.
#include "attention_item.cuh"

namespace {

#if HAS_WGMMA  // sm_90a

// Six warps: 0..3 compute; 4 finds this block's items and fills the ring with K (and q), V, K (and q), V ...; 5 counts what
// is in `partial`. Its fence and its atomic take microseconds on a busy memory, so the computing warps look at the answer to
// an item only DEFERRED items later.
constexpr int PENDING = 8, DEFERRED = 6;

template <int DP, int STAGES> struct Ring {
    static constexpr int PAGE_BYTES = PAGE_TOKENS * DP * 2;
    static constexpr int Q_BYTES = 16 * padded_row(DP);
    static constexpr int Q_SLOTS = (STAGES + 1) / 2;  // K of item n + Q_SLOTS is not copied before K of item n was read

    uint64_t full[STAGES], empty[STAGES];
    uint64_t early[STAGES];  // the part of the first STAGES buffers that is copied before the kernels before us have ended
    Item items[STAGES];

    uint64_t stored[PENDING], decided[PENDING];
    Item pending[PENDING];
    int last[PENDING];  // whether this block merges

    __device__ __forceinline__ void init() {
        for (int i = 0; i < STAGES; i++) {
            ptx::mbarrier_init(&full[i], 1);
            ptx::mbarrier_init(&empty[i], WARPS * WARP_ARRIVALS);
            ptx::mbarrier_init(&early[i], 1);
        }
        for (int i = 0; i < PENDING; i++) {
            ptx::mbarrier_init(&stored[i], WARPS * WARP_ARRIVALS);
            ptx::mbarrier_init(&decided[i], 1);
        }
        ptx::mbarrier_fence_init();
    }
};

// Tokens [from, end) of an item's K or V into a page buffer.
template <int DP> __device__ __forceinline__ void copy_tokens(uint8_t* buffer, const bf16* page, int from, int end, uint64_t* bar) {
    using P = Panels<DP>;
#pragma unroll
    for (int panel = 0; panel < P::COUNT; panel++) {
        int place = panel * P::PANEL_BYTES + from * P::ROW_BYTES;
        ptx::bulk_copy(buffer + place, page + place / 2, (end - from) * P::ROW_BYTES, bar);
    }
}

template <int DP, int STAGES>
__device__ __forceinline__ void produce(const Common& common, const Decode& d, const HeadBlocks& blocks, int num_blocks, uint8_t* pages, uint8_t* q_rows, Ring<DP, STAGES>& ring, int lane) {
    using R = Ring<DP, STAGES>;
    using P = Panels<DP>;
    // Lane n finds the block's n-th item. While the kernels before us end it copies what earlier steps wrote, all but the
    // row's own token, into the first buffers, and asks for a little more in L2. The metadata may still be another step's,
    // so each item is checked again.
    ptx::speculate();
    int index = blockIdx.x + lane * gridDim.x, copied = 0;
    Found found = {};
    if (index < __ldcg(d.page_prefix + d.rows) * num_blocks) found = find_item(common, d, blocks, num_blocks, index, false);
    int old_end = min(found.item.end, found.position - found.table_page * PAGE_TOKENS), from = found.item.first / GROUP_KEYS * GROUP_KEYS;
    for (int value = 0; value < 2; value++) {
        int n = 2 * lane + value;
        const bf16* page = (value ? d.v_layer : d.k_layer) + page_offset<DP>(d, blocks, found.item);
        if (n < STAGES) {
            if (old_end > from) {
                ptx::mbarrier_arrive_expect(&ring.early[n], (old_end - from) * DP * 2);
                copy_tokens<DP>(pages + n * R::PAGE_BYTES, page, from, old_end, &ring.early[n]);
            } else {
                ptx::mbarrier_arrive(&ring.early[n]);
            }
            copied = old_end;
        } else if (n < 4 && old_end > from) {
#pragma unroll
            for (int panel = 0; panel < P::COUNT; panel++) ptx::bulk_prefetch_l2(page + (panel * P::PANEL_BYTES + from * P::ROW_BYTES) / 2, (old_end - from) * P::ROW_BYTES);
        }
    }
    ptx::wait_for_previous();
    bool known = still_true(d, found);
    int total = __ldcg(d.page_prefix + d.rows) * num_blocks;
    if (!known || index >= total) {
        for (int n = 2 * lane; n < min(STAGES, 2 * lane + 2); n++) ptx::mbarrier_wait(&ring.early[n], 0);  // before the buffer is filled again
        copied = 0;
    }
    int stage = 0, parity = 1, q_slot = 0, first_round = 1;
    while (true) {
        bool wanted = index < total;
        if (wanted && !known) found = find_item(common, d, blocks, num_blocks, index, true);
        const Item& item = found.item;
        from = item.first / GROUP_KEYS * GROUP_KEYS;
        int heads = blocks.heads(item.block), count = __popc(__ballot_sync(0xFFFFFFFFu, wanted));
        int64_t offset = page_offset<DP>(d, blocks, item);
        const bf16* q = d.q + ((int64_t)item.row * d.num_heads + blocks.first_head(item.block)) * DP;
        for (int n = 0; n < count; n++) {
            for (int value = 0; value < 2; value++) {
                if (lane == n) {
                    int start = first_round && copied > from ? copied : from;
                    int bytes = (item.end - start) * DP * 2 + (value == 0 ? heads * DP * 2 : 0);
                    ptx::mbarrier_wait(&ring.empty[stage], parity);
                    if (value == 0) ring.items[stage] = item;
                    if (bytes > 0)
                        ptx::mbarrier_arrive_expect(&ring.full[stage], bytes);
                    else
                        ptx::mbarrier_arrive(&ring.full[stage]);
                    if (value == 0)
                        for (int h = 0; h < heads; h++) ptx::bulk_copy(q_rows + q_slot * R::Q_BYTES + h * padded_row(DP), q + h * DP, DP * 2, &ring.full[stage]);
                    if (item.end > start) copy_tokens<DP>(pages + stage * R::PAGE_BYTES, (value ? d.v_layer : d.k_layer) + offset, start, item.end, &ring.full[stage]);
                }
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                parity ^= stage == 0;
                first_round &= stage != 0;
                __syncwarp();
            }
            q_slot = q_slot + 1 == R::Q_SLOTS ? 0 : q_slot + 1;
        }
        if (count < 32) break;
        index += 32 * gridDim.x;
        known = false;
    }
}

// The sixth warp: counts items that are stored; several at once where it has fallen behind.
template <int DP, int STAGES> __device__ __forceinline__ void count_items(const Decode& d, int num_blocks, Ring<DP, STAGES>& ring, int lane) {
    ptx::wait_for_previous();
    int total = __ldcg(d.page_prefix + d.rows) * num_blocks;
    int items = blockIdx.x < total ? (total - 1 - (int)blockIdx.x) / (int)gridDim.x + 1 : 0;
    for (int n = 0; n < items;) {
        ptx::mbarrier_wait(&ring.stored[n % PENDING], n / PENDING % 2);
        int ready = 1;
        while (ready < PENDING && n + ready < items && ptx::mbarrier_test_wait(&ring.stored[(n + ready) % PENDING], (n + ready) / PENDING % 2)) ready++;
        ready = __shfl_sync(0xFFFFFFFFu, ready, 0);
        if (lane < ready) {
            int slot = (n + lane) % PENDING;
            ptx::mbarrier_wait(&ring.stored[slot], (n + lane) / PENDING % 2);  // it has: so that this lane sees what was stored
            Item item = ring.pending[slot];
            int last = 0;
            if (item.pages > 1) {
                uint32_t* counter = d.counters + (int64_t)item.row * num_blocks + item.block;
                last = ptx::atomic_add_ordered(counter, 1u) == (uint32_t)item.pages - 1;
                if (last) *counter = 0;
            }
            ring.last[slot] = last;
            ptx::mbarrier_arrive(&ring.decided[slot]);
        }
        __syncwarp();
        n += ready;
    }
}

template <int DP, int STAGES> __device__ __forceinline__ void merge_if_last(const Decode& d, const HeadBlocks& blocks, Ring<DP, STAGES>& ring, int n, int thread) {
    int slot = n % PENDING;
    ptx::mbarrier_wait(&ring.decided[slot], n / PENDING % 2);
    if (ring.last[slot]) merge_row<DP>(d, blocks, ring.pending[slot], thread);
}

// An item. read(results) is called after the last read of K and q, and again of V, with all that these reads went into;
// v_ready() returns when V may be read.
template <int DP, bool WHOLE, class Read, class VReady>
__device__ __forceinline__ void item_attention(const Decode& d, const HeadBlocks& blocks, const Item& item, Exchange& exchange, uint32_t k_page, uint32_t v_page, uint32_t q, int warp, int lane,
                                               Read read, VReady v_ready) {
    float t[16], o[DP / 8];
    item_scores<DP, WHOLE>(t, exchange, k_page, q, blocks.heads(item.block), item, warp, lane);
    read(t);
    ptx::named_barrier(1, COMPUTE_THREADS);
    float2 m = item_probabilities(t, exchange, d.scale_log2, warp, lane);
    v_ready();
    ptx::named_barrier(1, COMPUTE_THREADS);
    float2 l = item_sum(exchange, lane);
    item_values<DP, WHOLE>(o, exchange, v_page, item, warp, lane);
    read(o);
    item_store<DP>(d, blocks, item, m, l, o, warp, lane);
}

template <int DP, int STAGES>
__device__ __forceinline__ void consume(const Decode& d, uint32_t zero, const HeadBlocks& blocks, int num_blocks, uint8_t* pages, uint8_t* q_rows, Ring<DP, STAGES>& ring, Exchange& exchange, int warp, int lane) {
    using R = Ring<DP, STAGES>;
    ptx::wait_for_previous();
    int stage = 0, parity = 0, q_slot = 0, n = 0, thread = warp * 32 + lane;
    int total = __ldcg(d.page_prefix + d.rows) * num_blocks;
    auto next_stage = [&] {
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        parity ^= stage == 0;
    };
    auto wait = [&](int position) {
        if (position < STAGES) ptx::mbarrier_wait(&ring.early[stage], 0);
        ptx::mbarrier_wait(&ring.full[stage], parity);
    };
    auto release = [&](const auto& results) {
        warp_release<sizeof results / 16>(&ring.empty[stage], results, zero, lane);
        next_stage();
    };
    for (int index = blockIdx.x; index < total; index += gridDim.x, n++) {
        wait(2 * n);
        Item item = ring.items[stage];
        if (thread == 0) ring.pending[n % PENDING] = item;
        uint32_t k_page = ptx::shared_address(pages + stage * R::PAGE_BYTES), q = ptx::shared_address(q_rows + q_slot * R::Q_BYTES);
        int v_stage = stage + 1 == STAGES ? 0 : stage + 1;
        uint8_t* v_page = pages + v_stage * R::PAGE_BYTES;
        auto v_ready = [&] {
            wait(2 * n + 1);
            if (item.end % GROUP_KEYS == 0) return;
            zero_tokens<DP>(v_page, item.end, group_end(item.end), thread, COMPUTE_THREADS);
            ptx::fence_async_shared();  // a bulk copy overwrites the zeros later
        };
        if (item.first == 0 && item.end == PAGE_TOKENS)
            item_attention<DP, true>(d, blocks, item, exchange, k_page, ptx::shared_address(v_page), q, warp, lane, release, v_ready);
        else
            item_attention<DP, false>(d, blocks, item, exchange, k_page, ptx::shared_address(v_page), q, warp, lane, release, v_ready);
        warp_arrive(&ring.stored[n % PENDING], lane);
        q_slot = q_slot + 1 == R::Q_SLOTS ? 0 : q_slot + 1;
        if (n >= DEFERRED) merge_if_last(d, blocks, ring, n - DEFERRED, thread);
    }
    for (int i = max(0, n - DEFERRED); i < n; i++) merge_if_last(d, blocks, ring, i, thread);
}

template <int DP, int STAGES> __device__ __forceinline__ void decode(const Common& common, const Decode& d) {
    using R = Ring<DP, STAGES>;
    DYNAMIC_SHARED(smem);
    __shared__ R ring;
    Exchange& exchange = *reinterpret_cast<Exchange*>(smem + STAGES * R::PAGE_BYTES);
    uint8_t* q_rows = smem + STAGES * R::PAGE_BYTES + EXCHANGE_BYTES;
    HeadBlocks blocks(d.num_heads, d.num_kv_heads);
    int num_blocks = blocks.per_group * d.num_kv_heads, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        ring.init();
        exchange.zeros = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    if (warp == WARPS)
        produce<DP, STAGES>(common, d, blocks, num_blocks, smem, q_rows, ring, lane);
    else if (warp == WARPS + 1)
        count_items<DP, STAGES>(d, num_blocks, ring, lane);
    else
        consume<DP, STAGES>(d, common.zero, blocks, num_blocks, smem, q_rows, ring, exchange, warp, lane);
}

#else

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
        item_scores<DP, false>(t, exchange, ptx::shared_address(smem), ptx::shared_address(q_rows), heads, item, warp, lane);
        __syncthreads();
        if (V_OFFSET == 0) load_tokens<DP>(v_page, d.v_layer + offset, from, item.end, thread, COMPUTE_THREADS);
        ptx::cp_async_commit();
        float2 m = item_probabilities(t, exchange, d.scale_log2, warp, lane);
        ptx::cp_async_wait<0>();
        zero_tokens<DP>(v_page, item.end, group_end(item.end), thread, COMPUTE_THREADS);
        __syncthreads();
        float2 l = item_sum(exchange, lane);
        item_values<DP, false>(o, exchange, ptx::shared_address(v_page), item, warp, lane);
        item_store<DP>(d, blocks, item, m, l, o, warp, lane);
        finish_item<DP>(d, blocks, num_blocks, item, exchange, thread);
        __syncthreads();
    }
}

#endif

}  // namespace

#if HAS_WGMMA  // sm_90a
#define DECODE_THREADS (COMPUTE_THREADS + 64)
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
