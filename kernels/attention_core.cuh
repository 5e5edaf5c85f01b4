// The arithmetic of attention, shared by decode and prefill so that both give the same bits per (token, head).
//
// Keys are taken a page (128) at a time. For one query row q and one page (scale_log2 = log2(e) / sqrt(head_dim)):
//   t_k = q . k                     tensor core, head_dim ascending in steps of 16, one fp32 accumulator; invisible: -inf
//   m_page = scale_log2 * max t_k   (0 if no key is visible)
//   p_k = 2^(t_k * scale_log2 - m_page)      one fused multiply-add; invisible keys 0
//   l_page = sum p_k, in the order of page_sum() below
//   o_page = sum bf16(p_k) v_k      tensor core, keys ascending in steps of 16, one fp32 accumulator from 0
// Pages are merged in ascending order into (m, l, o) by merge_factors() and fmaf; at the end bf16(o / l). This is the
// online softmax of Milakov and Gimelshein 2018 (arXiv 1805.02867) as in FlashAttention-2 (Dao 2023, arXiv 2307.08691),
// with the block of keys fixed to a page whatever the kernel, so that neither batch nor chunks can change a bit.
//
// What cannot change a bit: the place of a row in its 16-row tile; who computes a page; leaving out 16 keys whose p are
// all 0 (adding +-0 * v to an accumulator that is never -0); a page without visible keys (b = 0); the sign of zeros, which
// finish() makes +0. V of invisible keys must be finite (0 * NaN), so kernels zero what they did not load.
#pragma once
#include "math.cuh"

namespace ptx {

// Two numbers rounded to bf16 (nearest, ties to even), `low` at the lower address.
__device__ __forceinline__ uint32_t pair_bf16(float low, float high) {
#ifdef APPLIANCE_EMULATE
    return (uint32_t)__bfloat16_as_ushort(__float2bfloat16_rn(low)) | (uint32_t)__bfloat16_as_ushort(__float2bfloat16_rn(high)) << 16;
#else
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}

}  // namespace ptx

namespace attention {

constexpr int GROUPS = 4;          // of a page's keys; the unit of work of a decode warp, and of skipping
constexpr int GROUP_KEYS = 32;
constexpr float MINUS_INFINITY = -__builtin_huge_valf();

// Which rows of q share a KV head: the Hq / Hkv heads of a group, at most 16 at a time (a "head block"; larger groups
// are several head blocks, each reading K and V again).
struct HeadBlocks {
    int group;      // query heads per KV head
    int per_group;  // head blocks per KV head
    __device__ __forceinline__ HeadBlocks(int num_heads, int num_kv_heads) {
        group = num_heads / num_kv_heads;
        per_group = (group + 15) / 16;
    }
    __device__ __forceinline__ int kv_head(int block) const { return block / per_group; }
    __device__ __forceinline__ int first_head(int block) const { return kv_head(block) * group + block % per_group * 16; }
    __device__ __forceinline__ int heads(int block) const { return min(16, group - block % per_group * 16); }
};

// Shared address of the 16-byte chunk `chunk` of token `token` in a page at `page` (common.cuh, "layouts").
template <int DP> __device__ __forceinline__ uint32_t chunk_address(uint32_t page, int token, int chunk) {
    return page + page_chunk(chunk, token, DP) * 16;
}
// A page's panels, each PANEL_BYTES apart; a token's row in a panel has ROW_BYTES.
template <int DP> struct Panels {
    static constexpr int COUNT = DP == 96 ? 1 : DP / 64;
    static constexpr int ROW_BYTES = DP == 96 ? 192 : 128;
    static constexpr int PANEL_BYTES = PAGE_TOKENS * ROW_BYTES;
};

// Tokens [from, end) of a page, global to shared, by cp.async of all `threads`; the caller commits.
template <int DP> __device__ __forceinline__ void load_tokens(uint8_t* page, const bf16* source, int from, int end, int thread, int threads) {
    using P = Panels<DP>;
    constexpr int CHUNKS = P::ROW_BYTES / 16;
    for (int i = thread; i < (end - from) * CHUNKS * P::COUNT; i += threads) {
        int chunk = i / (CHUNKS * P::COUNT) * CHUNKS + from * CHUNKS + i % CHUNKS, panel = i / CHUNKS % P::COUNT;
        int place = panel * P::PANEL_BYTES + chunk * 16;
        ptx::cp_async_16(ptx::shared_address(page + place), source + place / 2);
    }
}

// Zeroes tokens [from, end) of a page in shared memory.
template <int DP> __device__ __forceinline__ void zero_tokens(uint8_t* page, int from, int end, int thread, int threads) {
    using P = Panels<DP>;
    constexpr int CHUNKS = P::ROW_BYTES / 16;
    for (int i = thread; i < (end - from) * CHUNKS; i += threads)
#pragma unroll
        for (int panel = 0; panel < P::COUNT; panel++) *reinterpret_cast<uint4*>(page + panel * P::PANEL_BYTES + (from * CHUNKS + i) * 16) = make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ int group_end(int token) { return (token + GROUP_KEYS - 1) / GROUP_KEYS * GROUP_KEYS; }

// An 8-column tile of an accumulator of 16 rows. Tile t of lane 4g + c: [4t], [4t + 1] = row g, columns 8t + 2c and + 1;
// [4t + 2], [4t + 3] = row g + 8. So for mma.sync, and for a warp's 16 rows of wgmma.
template <int N> __device__ __forceinline__ float (&tile_of(float (&x)[N], int tile))[4] { return *reinterpret_cast<float(*)[4]>(x + 4 * tile); }

// t += q . k for 16 rows and the 8 * TILES keys from key0 on, over head_dim [16 step, 16 step + 16).
template <int DP, int TILES>
__device__ __forceinline__ void scores_step(float (&t)[TILES * 4], const uint32_t (&q)[4], uint32_t k_page, int key0, int step, int lane) {
#pragma unroll
    for (int pair = 0; pair < TILES / 2; pair++) {
        uint32_t k[4];
        int key = key0 + pair * 16 + (lane & 7) + (lane >> 4) * 8;
        ptx::ldmatrix_x4(k, chunk_address<DP>(k_page, key, 2 * step + ((lane >> 3) & 1)));
        ptx::mma_16816(tile_of(t, 2 * pair), q, k[0], k[1]);
        ptx::mma_16816(tile_of(t, 2 * pair + 1), q, k[2], k[3]);
    }
}

// Makes keys outside [first, end) of row g, and of row g + 8, invisible.
template <int TILES>
__device__ __forceinline__ void mask(float* t, int key0, int lane, int first_low, int end_low, int first_high, int end_high) {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int key = key0 + tile * 8 + (lane & 3) * 2 + i;
            if (key < first_low || key >= end_low) t[4 * tile + i] = MINUS_INFINITY;
            if (key < first_high || key >= end_high) t[4 * tile + 2 + i] = MINUS_INFINITY;
        }
}

__device__ __forceinline__ float quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, 1));
    return fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, 2));
}

// Largest t of rows g and g + 8 among this lane's keys.
template <int TILES> __device__ __forceinline__ void largest(const float* t, float& low, float& high) {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        low = fmaxf(low, fmaxf(t[4 * tile], t[4 * tile + 1]));
        high = fmaxf(high, fmaxf(t[4 * tile + 2], t[4 * tile + 3]));
    }
}

__device__ __forceinline__ float page_maximum(float largest_t, float scale_log2) {
    return largest_t == MINUS_INFINITY ? MINUS_INFINITY : __fmul_rn(largest_t, scale_log2);
}

// p of one group of 32 keys as the A operand of the two products of 16 keys, and this lane's sums of p: tiles ascending,
// the lane's first key before its second. `base`: m_page, or 0 where that is -inf.
__device__ __forceinline__ void probabilities(uint32_t (&p)[2][4], float& sum_low, float& sum_high, const float* t, float base_low,
                                              float base_high, float scale_log2) {
    sum_low = 0.0f;
    sum_high = 0.0f;
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
        float low0 = exp2_fixed(fmaf(t[4 * tile], scale_log2, -base_low)), low1 = exp2_fixed(fmaf(t[4 * tile + 1], scale_log2, -base_low));
        float high0 = exp2_fixed(fmaf(t[4 * tile + 2], scale_log2, -base_high)), high1 = exp2_fixed(fmaf(t[4 * tile + 3], scale_log2, -base_high));
        sum_low = __fadd_rn(__fadd_rn(sum_low, low0), low1);
        sum_high = __fadd_rn(__fadd_rn(sum_high, high0), high1);
        p[tile >> 1][(tile & 1) * 2] = ptx::pair_bf16(low0, low1);
        p[tile >> 1][(tile & 1) * 2 + 1] = ptx::pair_bf16(high0, high1);
    }
}

// l_page from a lane's sums over the four groups: groups pairwise, then the four lanes of a row pairwise.
__device__ __forceinline__ float page_sum(float g0, float g1, float g2, float g3) {
    float sum = __fadd_rn(__fadd_rn(g0, g1), __fadd_rn(g2, g3));
    sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, 1));
    return __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, 2));
}

// o += p . v for 16 rows, the 32 keys of `group`, and 8 * TILES columns of V from chunk `chunk0` on.
template <int DP, int TILES>
__device__ __forceinline__ void values_group(float (&o)[TILES * 4], const uint32_t (&p)[2][4], uint32_t v_page, int group, int chunk0, int lane) {
    constexpr int BATCH = TILES % 4 == 0 ? 4 : TILES;  // products in a row that do not wait for each other
#pragma unroll
    for (int tile0 = 0; tile0 < TILES; tile0 += BATCH) {
        uint32_t v[BATCH][4];
#pragma unroll
        for (int i = 0; i < BATCH; i++) ptx::ldmatrix_x4_trans(v[i], chunk_address<DP>(v_page, group * GROUP_KEYS + lane, chunk0 + tile0 + i));
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < BATCH; i++) ptx::mma_16816(tile_of(o, tile0 + i), p[half], v[i][2 * half], v[i][2 * half + 1]);
    }
}

// Merging a page into (m, l, o): l = fmaf(l, a, l_page * b), o = fmaf(o, a, o_page * b). Starts from m = -inf, l = o = 0.
__device__ __forceinline__ void merge_factors(float& m, float m_page, float& a, float& b) {
    float next = fmaxf(m, m_page);
    float base = next == MINUS_INFINITY ? 0.0f : next;
    a = exp2_fixed(__fadd_rn(m, -base));
    b = exp2_fixed(__fadd_rn(m_page, -base));
    m = next;
}
__device__ __forceinline__ float merged(float old, float a, float page, float b) { return fmaf(old, a, __fmul_rn(page, b)); }

__device__ __forceinline__ float inverse(float l) { return __fdiv_rn(1.0f, l); }
// The output element; adding 0 turns -0 into +0.
__device__ __forceinline__ float finish(float o, float inverse_l) { return __fadd_rn(__fmul_rn(o, inverse_l), 0.0f); }

// The page at place `page` of a slot's row of the block table; a bad entry is reported once and read as the dummy page.
__device__ __forceinline__ int page_index(const Common& common, const int32_t* block_tables, int table_width, int num_pages, int slot, int page,
                                          int head, int position, bool report) {
    int entry = page < table_width ? __ldcg(block_tables + (int64_t)slot * table_width + page) : -1;
    if (entry >= 0 && entry <= num_pages) return entry;
    if (report) report_error(common, ERROR_PAGE_RANGE, head, slot, position, entry);
    return num_pages;
}

}  // namespace attention
