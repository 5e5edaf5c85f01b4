// Selection in one row by a block of 512 threads: where a ranking reaches a count or a weight, exactly.
//
// The candidates of a row (logits >= threshold) are cut into 512 bins of equal width, bin 0 at the top. sampler_weigh has
// left the number of candidates in each bin and, where the weights of all are needed, their sum; and the best logit of
// every group of 128 neighbouring tokens. Every filter keeps a prefix of the ranking (engine/sampler.py), so it ends at one
// token: its bin is found in running sums, the tokens of a range of bins are gathered into a list in shared memory (from
// the groups that can have any), and the list is narrowed the same way, by rank, until a warp can finish it. Double
// precision is only ever computed for dense lists.
#pragma once
#include "sampler_state.cuh"

constexpr int FINISH_THREADS = 512, FINISH_WARPS = 16;
constexpr int BINS = 512;  // = FINISH_THREADS: a thread a bin
constexpr int GROUP = 128;  // tokens: a warp's four each
constexpr int MAX_GROUPS = (1 << VOCAB_BITS) / GROUP;
constexpr int LIST = 8192, LIST_GROUPS = LIST / GROUP;  // as many groups always fit

// Sums of 64 bits in shared memory by 32-bit atomics: 64-bit ones would be compare-and-swap loops there.
struct SplitSums {
    uint32_t low[BINS], high[BINS];
};
__device__ __forceinline__ void add_split(SplitSums& sums, int i, u64 value) {
    uint32_t low = (uint32_t)value, high = (uint32_t)(value >> 32);
    if (low != 0 && atomicAdd(&sums.low[i], low) > ~low) ++high;  // it wrapped
    if (high != 0) atomicAdd(&sums.high[i], high);
}
__device__ __forceinline__ u64 split_sum(const SplitSums& sums, int i) { return ((u64)sums.high[i] << 32) | sums.low[i]; }

// Bins of equal width between `top` and `threshold`: any function would do that never decreases as the logit falls.
struct Bins {
    float top, scale;
};
__device__ __forceinline__ Bins make_bins(float top, float threshold) {
    float width = fminf(__fsub_rn(top, threshold), FLOAT_MAX);
    return {top, width > 0.0f ? fminf(__fdiv_rn((float)BINS, width), FLOAT_MAX) : FLOAT_MAX};
}
__device__ __forceinline__ float depth_of(float logit, const Bins& bins) { return __fmul_rn(__fsub_rn(bins.top, logit), bins.scale); }
__device__ __forceinline__ int bin_of(float logit, const Bins& bins) { return (int)fminf(depth_of(logit, bins), (float)(BINS - 1)); }

enum Which { DRAWN, RAW };  // the logits a token is drawn from, and the model's (for logprobs)

struct Candidates {  // a row and what sampler_weigh says of it
    RowView row;
    float threshold;  // -inf: all tokens
    Bins bins;
    SoftmaxScale scale;
    u64* weights;      // (BINS,); null: only counts are there
    uint32_t* counts;  // (BINS,)
    uint32_t* tops;    // (groups,) order_key of the best logit
    int groups;
};

enum Order { BY_RANK, BY_ID };  // of a list: the ranking, or ids ascending

// Where a running sum reaches a target. Sums are over all that comes before, the last token included.
struct Cut {
    u64 key;     // rank of the last token, or (BY_ID) its id subtracted from ID_MASK: greater keys come before
    u64 weight;
    int count;
};

struct Span {  // keys lowest..highest, and the sums of all that comes before highest
    u64 lowest, highest, weight_before;
    int count_before, size;
};

struct Shared {
    u64 list[LIST];  // ranks
    int list_size;
    int bin;
    Span span;
    Cut cut;
    SplitSums weights;
    uint32_t counts[BINS];
    u64 running_weight[BINS];  // inclusive, over the whole row
    int running_count[BINS];
    double fractions[64];
    u64 warp_weight[FINISH_WARPS], warp_low[FINISH_WARPS];
    int warp_count[FINISH_WARPS];
    uint16_t marked[MAX_GROUPS];
    int num_marked;
    u64 few[32], best[BINS];
    int num_few;
    int chosen;
    u64 rest, total;
    Candidates rows[2];
};
// One variable for all functions: through a reference argument the compiler would lose that it is shared memory.
__device__ __forceinline__ Shared& finish_memory() {
    DYNAMIC_SHARED(memory);
    return *reinterpret_cast<Shared*>(memory);
}

// The weights of four logits, those below the threshold 0: f(i, weight) for the others; returns the sum. The four are
// computed side by side, without branches: the latency of double precision is long.
template <class F>
__device__ __forceinline__ u64 weigh_four(const float (&x)[4], const Candidates& row, const double* fractions, F f) {
    bool passes[4];
    u64 weight[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) passes[i] = x[i] >= row.threshold;
    if (!(passes[0] | passes[1] | passes[2] | passes[3])) return 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) weight[i] = softmax_weight(passes[i] ? x[i] : row.bins.top, row.scale, fractions);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (passes[i]) f(i, weight[i]);
        else weight[i] = 0;
    }
    return weight[0] + weight[1] + weight[2] + weight[3];
}

// ---- block-wide sums -------------------------------------------------------------------------------------------------

__device__ __forceinline__ u64 warp_inclusive(u64 value) {
    int lane = threadIdx.x & 31;
    for (int step = 1; step < 32; step *= 2) {
        u64 other = __shfl_up_sync(0xFFFFFFFF, value, step);
        if (lane >= step) value += other;
    }
    return value;
}
__device__ __forceinline__ u64 warp_sum(u64 value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, step);
    return value;
}

struct Sums {
    u64 weight;
    int count;
};

// Inclusive prefix sums over the threads of the block. Ends with the block in step.
__device__ __noinline__ inline Sums block_inclusive(u64 weight, int count) {
    Shared& shared = finish_memory();
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    weight = warp_inclusive(weight);
    count = (int)warp_inclusive((u64)count);
    if (lane == 31) {
        shared.warp_weight[warp] = weight;
        shared.warp_count[warp] = count;
    }
    __syncthreads();
    for (int before = 0; before < warp; ++before) {
        weight += shared.warp_weight[before];
        count += shared.warp_count[before];
    }
    __syncthreads();
    return {weight, count};
}

// The one place of a running sum where it first reaches the target. count, weight: inclusive sums, own ones in them.
__device__ __forceinline__ bool reaches(bool by_weight, u64 target, int count, int own_count, u64 weight, u64 own_weight) {
    if (by_weight) return weight >= target && weight - own_weight < target;
    return (u64)count >= target && (u64)(count - own_count) < target;
}

// ---- from the row to a list ------------------------------------------------------------------------------------------

// The list = candidates of the groups begin..end-1, bins first..last, ranks lowest..highest; LIST of them at most.
__device__ __noinline__ inline void gather(Which which, int begin, int end, int first, int last, u64 lowest, u64 highest) {
    constexpr int LOADS = 8;
    Shared& shared = finish_memory();
    const Candidates& row = shared.rows[which];
    const RowView view = row.row;
    const float threshold = row.threshold, from = (float)first, to = (float)(last + 1);
    const bool open = last == BINS - 1;  // the last bin has all that lies deeper
    const Bins bins = row.bins;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    __syncthreads();
    if (threadIdx.x == 0) shared.list_size = shared.num_marked = 0;
    __syncthreads();
    for (int group = begin + threadIdx.x; group < end; group += FINISH_THREADS) {
        float top = value_of_key(row.tops[group]);
        if (top >= threshold && (open || depth_of(top, bins) < to)) shared.marked[atomicAdd(&shared.num_marked, 1)] = (uint16_t)group;
    }
    __syncthreads();
    for (int start = warp; start < shared.num_marked; start += FINISH_WARPS * LOADS) {
        float4 x[LOADS];
        int at[LOADS];
        uint32_t passes = 0;  // a bit a token
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            int index = start + i * FINISH_WARPS;
            at[i] = index < shared.num_marked ? shared.marked[index] * GROUP + lane * 4 : view.vocab;
            x[i] = at[i] < view.vocab ? load_logits(view, at[i]) : float4{};
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const float logits[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float depth = depth_of(logits[j], bins);
                bool in_range = at[i] + j < view.vocab && logits[j] >= threshold && depth >= from && (open || depth < to);
                if (in_range) {
                    u64 rank = make_rank(order_key(logits[j]), at[i] + j);
                    if (rank >= lowest && rank <= highest) passes |= 1u << (i * 4 + j);
                }
            }
        }
        int count = __popc(passes), inclusive = count;
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(0xFFFFFFFF, inclusive, step);
            if (lane >= step) inclusive += other;
        }
        int place = lane == 31 && inclusive > 0 ? atomicAdd(&shared.list_size, inclusive) : 0;
        place = __shfl_sync(0xFFFFFFFF, place, 31) + inclusive - count;
        if (passes == 0) continue;
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const float logits[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (!(passes >> (i * 4 + j) & 1)) continue;
                if (place < LIST) shared.list[place] = make_rank(order_key(logits[j]), at[i] + j);
                ++place;
            }
        }
    }
    __syncthreads();
}

__device__ __forceinline__ u64 list_weight(const Shared& shared, Which which, u64 rank) {
    return softmax_weight(rank_value(rank), shared.rows[which].scale, shared.fractions);
}

// ---- narrowing a list ------------------------------------------------------------------------------------------------

__device__ __forceinline__ u64 list_key(Order order, u64 rank) { return order == BY_RANK ? rank : rank & ID_MASK; }

// f(key, rank) for the entries of the list from rank `lowest` on whose key is in shared.span.
template <class F>
__device__ __forceinline__ void for_list(Order order, u64 lowest, F f) {
    Shared& shared = finish_memory();
    const int size = shared.list_size;
    const u64 low = shared.span.lowest, high = shared.span.highest;
    for (int i = threadIdx.x; i < size; i += FINISH_THREADS) {
        u64 rank = shared.list[i], key = list_key(order, rank);
        if (rank >= lowest && key >= low && key <= high) f(key, rank);
    }
}

struct Extremes {
    u64 highest, lowest;
};

// Of the threads' keys, for all.
__device__ __noinline__ inline Extremes block_extremes(u64 highest, u64 lowest) {
    Shared& shared = finish_memory();
    u64 high = warp_max(highest), low = ~warp_max(~lowest);
    if ((threadIdx.x & 31) == 0) {
        shared.warp_weight[threadIdx.x >> 5] = high;
        shared.warp_low[threadIdx.x >> 5] = low;
    }
    __syncthreads();
    for (int i = 0; i < FINISH_WARPS; ++i) {
        high = shared.warp_weight[i] > high ? shared.warp_weight[i] : high;
        low = shared.warp_low[i] < low ? shared.warp_low[i] : low;
    }
    __syncthreads();
    return {high, low};
}

// 512 parts of equal size of the keys between two extremes.
__device__ __forceinline__ int part_shift(const Extremes& ends) {
    const int bits = 64 - __clzll((long long)(ends.highest - ends.lowest));
    return max(bits - 9, 0);
}

__device__ __forceinline__ void clear_parts(Shared& shared) {
    shared.counts[threadIdx.x] = shared.weights.low[threadIdx.x] = shared.weights.high[threadIdx.x] = 0;
    __syncthreads();
}

// shared.span = its part where the running sum reaches the target. Needs the parts' sums in shared.counts and weights.
__device__ __noinline__ inline void narrow(bool by_weight, u64 target, u64 highest, int shift) {
    Shared& shared = finish_memory();
    __syncthreads();
    const Span span = shared.span;
    const int part = threadIdx.x, own_count = (int)shared.counts[part];
    const u64 own_weight = split_sum(shared.weights, part);
    const Sums sums = block_inclusive(own_weight, own_count);
    const int count = sums.count + span.count_before;
    const u64 weight = sums.weight + span.weight_before;
    if (reaches(by_weight, target, count, own_count, weight, own_weight)) {
        u64 above = (u64)part << shift, last = above + (1ull << shift) - 1;
        shared.span = {last < highest ? highest - last : 0, highest - above, weight - own_weight, count - own_count, own_count};
    }
    __syncthreads();
}

// shared.cut = where the running sum over the list, in its order and from rank `lowest` on, reaches the target.
// shared.span: where it is known to do so.
__device__ __noinline__ inline void select_in_list(Which which, Order order, u64 lowest, bool by_weight, u64 target) {
    Shared& shared = finish_memory();
    const bool weighs = which == DRAWN;
    while (shared.span.size > 32) {
        u64 high = 0, low = ~0ull;
        for_list(order, lowest, [&](u64 key, u64) {
            high = key > high ? key : high;
            low = key < low ? key : low;
        });
        const Extremes ends = block_extremes(high, low);
        const int shift = part_shift(ends);
        clear_parts(shared);
        for_list(order, lowest, [&](u64 key, u64 rank) {
            int part = (int)((ends.highest - key) >> shift);
            atomicAdd(&shared.counts[part], 1u);
            if (weighs) add_split(shared.weights, part, list_weight(shared, which, rank));
        });
        narrow(by_weight, target, ends.highest, shift);
    }
    if (threadIdx.x == 0) shared.num_few = 0;
    __syncthreads();
    for_list(order, lowest, [&](u64, u64 rank) { shared.few[atomicAdd(&shared.num_few, 1)] = rank; });
    __syncthreads();
    if (threadIdx.x < 32) {
        bool valid = threadIdx.x < shared.num_few;
        u64 rank = valid ? shared.few[threadIdx.x] : 0, key = list_key(order, rank), own = valid && weighs ? list_weight(shared, which, rank) : 0;
        u64 weight = shared.span.weight_before;
        int count = shared.span.count_before;
        for (int other = 0; other < shared.num_few; ++other) {
            u64 other_key = __shfl_sync(0xFFFFFFFF, key, other), other_weight = __shfl_sync(0xFFFFFFFF, own, other);
            if (other_key >= key) {
                weight += other_weight;
                ++count;
            }
        }
        if (valid && reaches(by_weight, target, count, 1, weight, own)) shared.cut = {key, weight, count};
    }
    __syncthreads();
}

// The same over the whole list.
__device__ __forceinline__ void select_in_whole_list(Which which, Order order, u64 lowest, bool by_weight, u64 target) {
    Shared& shared = finish_memory();
    if (threadIdx.x == 0) shared.span = {0, ~0ull, 0, 0, shared.list_size};
    __syncthreads();
    select_in_list(which, order, lowest, by_weight, target);
}

// ---- where the ranking of a row reaches a target ---------------------------------------------------------------------

// Running sums of the row's bins; the bins are left clear for the next step.
__device__ __noinline__ inline void sum_bins(Which which) {
    Shared& shared = finish_memory();
    const Candidates& row = shared.rows[which];
    const int bin = threadIdx.x, count = (int)row.counts[bin];
    row.counts[bin] = 0;
    u64 weight = 0;
    if (row.weights != nullptr) {
        weight = row.weights[bin];
        row.weights[bin] = 0;
    }
    const Sums sums = block_inclusive(weight, count);
    shared.running_weight[bin] = sums.weight;
    shared.running_count[bin] = sums.count;
    __syncthreads();
}

// shared.bin = the bin where the row reaches `target` tokens, or that weight; shared.span = its sums. Needs sum_bins.
__device__ __noinline__ inline void find_bin(bool by_weight, u64 target) {
    Shared& shared = finish_memory();
    int bin = threadIdx.x, count = shared.running_count[bin], own_count = count - (bin > 0 ? shared.running_count[bin - 1] : 0);
    u64 weight = shared.running_weight[bin], own_weight = weight - (bin > 0 ? shared.running_weight[bin - 1] : 0);
    if (reaches(by_weight, target, count, own_count, weight, own_weight)) {
        shared.bin = bin;
        shared.span = {0, ~0ull, weight - own_weight, count - own_count, own_count};
    }
    __syncthreads();
}

// The cut in the bin that find_bin has found, whatever its size: while it does not fit the list, the span is narrowed by
// passes over the row, as many tokens at a time as the list holds.
__device__ __noinline__ inline void cut_bin(Which which, bool by_weight, u64 target) {
    Shared& shared = finish_memory();
    const int bin = shared.bin;
    const int groups = shared.rows[which].groups;
    while (shared.span.size > LIST) {
        const Span span = shared.span;
        u64 high = 0, low = ~0ull;
        for (int group = 0; group < groups; group += LIST_GROUPS) {
            gather(which, group, min(group + LIST_GROUPS, groups), bin, bin, span.lowest, span.highest);
            for_list(BY_RANK, 0, [&](u64 key, u64) {
                high = key > high ? key : high;
                low = key < low ? key : low;
            });
        }
        const Extremes ends = block_extremes(high, low);
        const int shift = part_shift(ends);
        clear_parts(shared);
        for (int group = 0; group < groups; group += LIST_GROUPS) {
            gather(which, group, min(group + LIST_GROUPS, groups), bin, bin, span.lowest, span.highest);
            for_list(BY_RANK, 0, [&](u64 key, u64 rank) {
                int part = (int)((ends.highest - key) >> shift);
                atomicAdd(&shared.counts[part], 1u);
                if (which == DRAWN) add_split(shared.weights, part, list_weight(shared, which, rank));
            });
        }
        narrow(by_weight, target, ends.highest, shift);
    }
    gather(which, 0, groups, bin, bin, shared.span.lowest, shared.span.highest);
    select_in_list(which, BY_RANK, 0, by_weight, target);
}
