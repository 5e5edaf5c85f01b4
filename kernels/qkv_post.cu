// What stands between the QKV product and attention: bias, per-head RMSNorm, rope, rounding to bf16, K and V into the pages.
//
//   x = qkv + bias                                                         (Qwen2; where bias is not null)
//   q, k heads: x = (x * inv) * weight, inv = 1 / sqrt(sum(x^2) / D + eps)       (Qwen3, arXiv 2505.09388; likewise)
//   q, k heads: (first, second) -> (first cos - second sin, second cos + first sin), elements i, i + D/2 (arXiv 2104.09864)
//
// qkv (T, (Hq + 2 Hkv) D) fp32, heads q, k, v; bias the same row; q_norm, k_norm (D,); cos, sin (max_position, D/2) fp32;
// q (T, Hq, Dp) bf16; k_layer, v_layer (num_pages + 1, Hkv, 128, Dp) bf16, swizzled (common.cuh:kv_offset); Dp: D rounded up
// to 64, 96, 128 or 256. Columns D..Dp of q, k and v become zeros. Each operation rounds once, in this order; the norm's sum
// is the canonical tree (math.cuh) over D. So the bits depend on nothing but the row.
//
// A position past the tables or a page outside the pool is reported once and nothing of that row is written; a NaN or Inf in
// a result is reported with its head (value: its element in the row of qkv) and written: it stays in its own sequence.
// Only padding rows (slot dummy_slot) may use the dummy page num_pages.
//
// A warp takes a head, Dp/32 neighbouring elements a lane (Dp 96: four, 24 lanes), so the tree is registers, then shuffles,
// and the partner i + D/2 of every element of a lane is in one other lane: D % (2 elements) == 0. Few rows are bound by
// latency: one head a warp, bias and norm weights loaded while the kernel before still runs. Many rows (_many) are bound by
// the bytes in flight: four heads of a row a warp (Dp 256: two), which share one position, page, cos and sin.
// Launch: grid (T, heads / heads of a block rounded up), block up to 8 warps.
#include "math.cuh"

namespace {

struct Heads {  // the kernel's parameters, for the functions below
    const float *qkv, *bias, *q_norm, *k_norm, *cos, *sin;
    const int32_t *positions, *slots, *block_tables;
    bf16 *q, *k_layer, *v_layer;
    int table_width, num_pages, dummy_slot, num_q, num_kv, head_dim, max_position;
    float eps;
};

template <int N> struct alignas(4 * N) FloatVector { float v[N]; };
template <int N> struct alignas(2 * N) HalfWords { uint32_t v[N / 2]; };

// N floats from an address that is a multiple of min(4 N, 16) bytes; zeros where not `inside`.
template <int N> __device__ __forceinline__ void load(float (&out)[N], const float* from, bool inside) {
    constexpr int STEP = N < 4 ? N : 4;
#pragma unroll
    for (int i = 0; i < N; i += STEP) {
        FloatVector<STEP> piece = {};
        if (inside) piece = *reinterpret_cast<const FloatVector<STEP>*>(from + i);
#pragma unroll
        for (int j = 0; j < STEP; j++) out[i + j] = piece.v[j];
    }
}

template <int N> __device__ __forceinline__ void store(bf16* to, const float (&x)[N]) {
    HalfWords<N> words;
#pragma unroll
    for (int i = 0; i < N / 2; i++) words.v[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
    *reinterpret_cast<HalfWords<N>*>(to) = words;
}

template <int N> __device__ __forceinline__ void normalise(float (&x)[N], const float (&weight)[N], int head_dim, float eps) {
    float squares[N];
#pragma unroll
    for (int i = 0; i < N; i++) squares[i] = __fmul_rn(x[i], x[i]);
    float sum = warp_tree_sum(tree_sum(squares));
    float inv = 1.0f / sqrtf(__fadd_rn(sum / (float)head_dim, eps));
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = __fmul_rn(__fmul_rn(x[i], inv), weight[i]);
}

// Lanes below `half_lanes` hold first halves, as many lanes above them the second ones.
template <int N> __device__ __forceinline__ void rotate(float (&x)[N], const float (&cos)[N], const float (&sin)[N], int lane, int half_lanes) {
    bool is_second = lane >= half_lanes;
    int partner = is_second ? lane - half_lanes : lane + half_lanes;
#pragma unroll
    for (int i = 0; i < N; i++) {
        float other = __shfl_sync(0xFFFFFFFFu, x[i], partner & 31);
        float turned = __fmul_rn(other, sin[i]);
        x[i] = __fadd_rn(__fmul_rn(x[i], cos[i]), is_second ? turned : -turned);
    }
}

// Page of this position in the pool, or -1 after a report. All lanes of all warps of a row; the first warp reports.
__device__ __forceinline__ int find_page(const Common& common, const Heads& h, int slot, int position, bool reports) {
    ErrorCode code = ERROR_POSITION_RANGE;
    int value = position;
    if (position >= 0 && position < h.max_position && position / PAGE_TOKENS < h.table_width) {
        int page = h.block_tables[(int64_t)slot * h.table_width + position / PAGE_TOKENS];
        if (page >= 0 && page < h.num_pages + (slot == h.dummy_slot)) return page;
        code = ERROR_PAGE_RANGE, value = page;
    }
    if (reports) report_error(common, code, -1, slot, position, value);
    return -1;
}

// Norm weight of this head, or null.
__device__ __forceinline__ const float* norm_of(const Heads& h, int head) {
    return head < h.num_q ? h.q_norm : head < h.num_q + h.num_kv ? h.k_norm : nullptr;
}

template <int N> __device__ __forceinline__ void report_nonfinite(const Common& common, const float (&x)[N], int first_element, bool inside, int lane, int head, int slot, int position) {
    int bad = -1;
#pragma unroll
    for (int i = N - 1; i >= 0; i--)
        if ((__float_as_uint(x[i]) & 0x7F800000u) == 0x7F800000u) bad = first_element + i;
    uint32_t bad_lanes = __ballot_sync(0xFFFFFFFFu, inside && bad >= 0);
    if (bad_lanes != 0 && lane == __ffs(bad_lanes) - 1) report_error(common, ERROR_NONFINITE, head, slot, position, bad);
}

template <int N, int DP, int HEADS>
__device__ __forceinline__ void process_heads(const Common& common, const Heads& h) {
    begin_kernel(common);
    int lane = threadIdx.x & 31, first = (blockIdx.y * (blockDim.x >> 5) + (threadIdx.x >> 5)) * HEADS;
    int num_heads = h.num_q + 2 * h.num_kv, rotated = h.num_q + h.num_kv;
    if (first >= num_heads) return;
    int d = lane * N;
    bool inside = d < h.head_dim;
    float bias[N], weight[N], x[HEADS][N], cos[N], sin[N];
    if (HEADS == 1) {
        if (h.bias != nullptr) load(bias, h.bias + first * h.head_dim + d, inside);
        if (norm_of(h, first) != nullptr) load(weight, norm_of(h, first) + d, inside);
    }

    ptx::wait_for_previous();
    int token = blockIdx.x, position = h.positions[token], slot = h.slots[token];
#pragma unroll
    for (int i = 0; i < HEADS; i++)
        load(x[i], h.qkv + ((int64_t)token * num_heads + first + i) * h.head_dim + d, inside && first + i < num_heads);
    int page = find_page(common, h, slot, position, first == 0 && lane == 0);
    if (page < 0) return;
    int half = h.head_dim / 2, pair = d < half ? d : d - half;
    if (first < rotated) {
        load(cos, h.cos + (int64_t)position * half + pair, inside);
        load(sin, h.sin + (int64_t)position * half + pair, inside);
    }

#pragma unroll
    for (int i = 0; i < HEADS; i++) {
        int head = first + i;
        if (head >= num_heads) break;
        const float* norm = norm_of(h, head);
        if (HEADS > 1) {
            if (h.bias != nullptr) load(bias, h.bias + head * h.head_dim + d, inside);
            if (norm != nullptr) load(weight, norm + d, inside);
        }
        if (h.bias != nullptr)
#pragma unroll
            for (int j = 0; j < N; j++) x[i][j] = __fadd_rn(x[i][j], bias[j]);
        if (norm != nullptr) normalise(x[i], weight, h.head_dim, h.eps);
        if (head < rotated) rotate(x[i], cos, sin, lane, half / N);
        // A padding row may hold what a NaN of an earlier step left behind: it belongs to nobody.
        report_nonfinite(common, x[i], head * h.head_dim + d, inside && slot != h.dummy_slot, lane, head, slot, position);
        if (d >= DP) continue;
        if (!inside) {  // zeros so far, but for a NaN that rope may have brought from inside
#pragma unroll
            for (int j = 0; j < N; j++) x[i][j] = 0.0f;
        }
        if (head < h.num_q) {
            store(h.q + ((int64_t)token * h.num_q + head) * DP + d, x[i]);
        } else {
            bf16* layer = head < rotated ? h.k_layer : h.v_layer;
            int kv_head = head - (head < rotated ? h.num_q : rotated);
            store(layer + kv_offset(page, kv_head, position % PAGE_TOKENS, d, h.num_kv, DP), x[i]);
        }
    }
}

}  // namespace

#define QKV_POST(NAME, DP, N, HEADS)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                              \
        const Common common, const float* qkv, const float* bias, const float* q_norm, const float* k_norm,              \
        const float* cos, const float* sin, const int32_t* positions, const int32_t* slots, const int32_t* block_tables, \
        int table_width, int num_pages, int dummy_slot, bf16* q, bf16* k_layer, bf16* v_layer, int num_q, int num_kv,    \
        int head_dim, int max_position, float eps) {                                                                     \
        process_heads<N, DP, HEADS>(common, {qkv, bias, q_norm, k_norm, cos, sin, positions, slots, block_tables, q,     \
                                             k_layer, v_layer, table_width, num_pages, dummy_slot, num_q, num_kv,        \
                                             head_dim, max_position, eps});                                              \
    }

QKV_POST(qkv_post_d64, 64, 2, 1)
QKV_POST(qkv_post_d96, 96, 4, 1)
QKV_POST(qkv_post_d128, 128, 4, 1)
QKV_POST(qkv_post_d256, 256, 8, 1)
QKV_POST(qkv_post_d64_many, 64, 2, 4)
QKV_POST(qkv_post_d96_many, 96, 4, 4)
QKV_POST(qkv_post_d128_many, 128, 4, 4)
QKV_POST(qkv_post_d256_many, 256, 8, 2)
