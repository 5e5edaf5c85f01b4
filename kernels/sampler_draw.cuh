// sampler_finish's parts: the draw and the k best.
#pragma once
#include "sampler_select.cuh"

// engine/rng.py:token_bits: Philox4x32-10 (Salmon et al., SC 2011).
__device__ __forceinline__ u64 token_bits(uint32_t seed_low, uint32_t seed_high, uint32_t choice, uint32_t position) {
    uint32_t c0 = position, c1 = choice, c2 = 0, c3 = 0;  // STREAM_SAMPLE = 0
#pragma unroll 1
    for (int round = 0; round < 10; ++round) {
        uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ seed_low;
        c1 = low1;
        c2 = high0 ^ c3 ^ seed_high;
        c3 = low0;
        seed_low += 0x9E3779B9u;
        seed_high += 0xBB67AE85u;
    }
    return ((u64)c0 << 32) | c1;
}

// max(1, ceil(share * total / 2^53))
__device__ __forceinline__ u64 nucleus_target(u64 share, u64 total) {
    u64 high = __umul64hi(share, total), low = share * total, sum = low + ((1ull << 53) - 1);
    if (sum < low) ++high;
    u64 target = (high << 11) | (sum >> 53);
    return target > 1 ? target : 1;
}

// ---- few are kept: the list has them all -----------------------------------------------------------------------------

// Steps 9 and 10 of engine/sampler.py over the list; the cut of top_k, or `total` without one, is in shared.cut.
__device__ __noinline__ inline int draw_from_list(u64 top_p_share, u64 bits) {
    Shared& shared = finish_memory();
    u64 lowest = shared.cut.key, total = shared.cut.weight;
    __syncthreads();
    if (top_p_share < NO_TOP_P) {
        u64 target = nucleus_target(top_p_share, total);
        if (target < total) {
            select_in_whole_list(DRAWN, BY_RANK, lowest, true, target);
            lowest = shared.cut.key;
            total = shared.cut.weight;
            __syncthreads();
        }
    }
    select_in_whole_list(DRAWN, BY_ID, lowest, true, __umul64hi(bits, total) + 1);
    return rank_id(shared.cut.key);
}

// The `count` first of the row into the list, perhaps with some that come after them. 0 < count <= LIST.
__device__ __noinline__ inline void list_first(Which which, int count) {
    Shared& shared = finish_memory();
    find_bin(false, (u64)count);
    const int bin = shared.bin;
    u64 lowest = 0;
    if (shared.running_count[bin] > LIST) {
        cut_bin(which, false, (u64)count);
        lowest = shared.cut.key;
    }
    gather(which, 0, shared.rows[which].groups, 0, bin, lowest, ~0ull);
}

// ---- many are kept: running sums of groups ---------------------------------------------------------------------------

// The weights of this lane's four tokens of a group, 0 for those that rank after `cutoff`; returns their sum.
__device__ __forceinline__ u64 weigh_group(int group, u64 cutoff, u64 (&weights)[4]) {
    Shared& shared = finish_memory();
    const Candidates row = shared.rows[DRAWN];
    const int first = group * GROUP + (threadIdx.x & 31) * 4;
    const float4 x = first < row.row.vocab ? load_logits(row.row, first) : float4{};
    float kept[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        weights[i] = 0;
        if (first + i >= row.row.vocab || make_rank(order_key(kept[i]), first + i) < cutoff) kept[i] = -INFINITY;
    }
    return weigh_four(kept, row, shared.fractions, [&](int i, u64 weight) { weights[i] = weight; });
}

// Step 10 with the weight of every group's kept tokens in group_sums: the group, then the token.
__device__ __noinline__ inline int draw_from_groups(u64 cutoff, u64 bits, u64* group_sums) {
    Shared& shared = finish_memory();
    const int groups = shared.rows[DRAWN].groups, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u64 weights[4];
    if (cutoff > 0) {
        for (int group = warp; group < groups; group += FINISH_WARPS) {
            u64 sum = warp_sum(weigh_group(group, cutoff, weights));
            if (lane == 0) group_sums[group] = sum;
        }
        __syncthreads();
    }
    constexpr int OWN = MAX_GROUPS / FINISH_THREADS;  // neighbouring groups of a thread
    const int share = (groups + FINISH_THREADS - 1) / FINISH_THREADS, first = threadIdx.x * share;
    u64 own[OWN], sum = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        own[i] = i < share && first + i < groups ? group_sums[first + i] : 0;
        sum += own[i];
    }
    const u64 inclusive = block_inclusive(sum, 0).weight;
    if (threadIdx.x == FINISH_THREADS - 1) shared.total = inclusive;
    __syncthreads();
    const u64 r = __umul64hi(bits, shared.total);
    u64 before = inclusive - sum;
    if (before <= r && r < inclusive) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            if (before <= r && r - before < own[i]) {
                shared.chosen = first + i;
                shared.rest = r - before;
            }
            before += own[i];
        }
    }
    __syncthreads();
    const int group = shared.chosen;
    const u64 rest = shared.rest;
    __syncthreads();
    if (warp == 0) {
        sum = weigh_group(group, cutoff, weights);
        before = warp_inclusive(sum) - sum;
        if (before <= rest && rest - before < sum) {
            int i = 0;
            if (rest - before >= weights[0]) i = 1;
            if (rest - before >= weights[0] + weights[1]) i = 2;
            if (rest - before >= weights[0] + weights[1] + weights[2]) i = 3;
            shared.chosen = group * GROUP + lane * 4 + i;
        }
    }
    __syncthreads();
    return shared.chosen;
}

// ---- the draw --------------------------------------------------------------------------------------------------------

// Steps 8-10 of engine/sampler.py (7, min_p, is the candidates' threshold). group_sums: of all candidates, where there are
// no filters; else free to use.
__device__ __forceinline__ int draw_token(const SlotParams& slot, uint32_t todo, int num_generated, u64* group_sums) {
    Shared& shared = finish_memory();
    const u64 bits = token_bits(slot.seed_low, slot.seed_high, slot.choice, (uint32_t)num_generated), share = slot.top_p_share;
    if (!(todo & TODO_COUNTS)) return draw_from_groups(0, bits, group_sums);
    sum_bins(DRAWN);
    const int count = shared.running_count[BINS - 1], kept = slot.top_k > 0 ? min(slot.top_k, count) : count;
    if (!(todo & TODO_WEIGHTS)) {  // top_k <= LIST
        list_first(DRAWN, kept);
        select_in_whole_list(DRAWN, BY_RANK, 0, false, (u64)kept);
        return draw_from_list(share, bits);
    }
    u64 total = shared.running_weight[BINS - 1], cutoff = 1;  // less than any rank
    if (kept < count) {
        find_bin(false, (u64)kept);
        cut_bin(DRAWN, false, (u64)kept);
        cutoff = shared.cut.key;
        total = shared.cut.weight;
        __syncthreads();
    }
    const u64 target = share < NO_TOP_P ? nucleus_target(share, total) : total;
    if (target < total) {
        find_bin(true, target);
        const int bin = shared.bin;
        if (shared.running_count[bin] <= LIST) {
            gather(DRAWN, 0, shared.rows[DRAWN].groups, 0, bin, cutoff, ~0ull);
            if (threadIdx.x == 0) shared.cut = {0, total, 0};
            __syncthreads();
            return draw_from_list(share, bits);
        }
        cut_bin(DRAWN, true, target);
        cutoff = shared.cut.key;
    }
    return draw_from_groups(cutoff, bits, group_sums);
}

// ---- the k best ------------------------------------------------------------------------------------------------------

// The `num_best` first of the raw ranking, in order, to shared.best; 0 < num_best <= BINS.
__device__ __noinline__ inline void find_best(int num_best) {
    Shared& shared = finish_memory();
    __syncthreads();
    sum_bins(RAW);
    list_first(RAW, num_best);
    select_in_whole_list(RAW, BY_RANK, 0, false, (u64)num_best);
    const u64 lowest = shared.cut.key;
    if (threadIdx.x == 0) shared.num_few = 0;
    shared.best[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < shared.list_size; i += FINISH_THREADS)
        if (shared.list[i] >= lowest) shared.best[atomicAdd(&shared.num_few, 1)] = shared.list[i];
    __syncthreads();
    const int pair = threadIdx.x;
    int padded = 2;
    while (padded < num_best) padded *= 2;
    for (int span = 2; span <= padded; span *= 2) {  // bitonic (Batcher 1968), descending
        for (int step = span / 2; step > 0; step /= 2) {
            if (pair < padded / 2) {
                int i = 2 * pair - (pair & (step - 1)), j = i + step;
                u64 a = shared.best[i], b = shared.best[j];
                if ((a < b) == ((i & span) == 0)) {
                    shared.best[i] = b;
                    shared.best[j] = a;
                }
            }
            __syncthreads();
        }
    }
}
