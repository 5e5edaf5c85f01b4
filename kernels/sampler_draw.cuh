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
    mark_chunks(which, 0, bin);
    gather(which, 0, shared.num_marked, 0, bin, lowest, ~0ull);
}

// ---- many are kept: running sums of chunks ---------------------------------------------------------------------------

// shared.chunk_weight = the weight of every chunk's tokens from rank `cutoff` on; `bin`: where the cutoff is.
__device__ __noinline__ inline void sum_kept(int bin, u64 cutoff) {
    Shared& shared = finish_memory();
    const u64* weights = shared.rows[DRAWN].chunk_weights;
    const int chunks = shared.rows[DRAWN].chunks, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int chunk = warp; chunk < chunks; chunk += FINISH_WARPS) {
        u64 sum = 0;
        for (int above = lane; above < bin; above += 32) sum += weights[chunk * BINS + above];
        sum = warp_sum(sum);
        if (lane == 0) shared.chunk_weight[chunk] = sum;
    }
    mark_chunks(DRAWN, bin, bin);
    if (threadIdx.x == 0) shared.span = {0, ~0ull, 0, 0, 0};
    for (int i = 0; i < shared.num_marked; ++i) {
        gather(DRAWN, i, i + 1, bin, bin, cutoff, ~0ull);
        u64 sum = 0;
        for_list(BY_RANK, 0, [&](u64, u64 rank) { sum += list_weight(shared, DRAWN, rank); });
        sum = warp_sum(sum);
        if (lane == 0) shared.warp_weight[warp] = sum;
        __syncthreads();
        if (warp == 0) {
            sum = warp_sum(lane < FINISH_WARPS ? shared.warp_weight[lane] : 0);
            if (lane == 0) shared.chunk_weight[shared.marked[i]] += sum;
        }
        __syncthreads();
    }
}

// Of n <= 64 sums in the order of i, the first whose running sum is greater than r: shared.chosen, and in shared.rest what
// is left of r there. One warp; the block must be brought in step.
template <class Sum>
__device__ __forceinline__ void choose_of_64(int n, u64 r, Sum sum_of) {
    Shared& shared = finish_memory();
    int first = 2 * (threadIdx.x & 31);
    u64 a = first < n ? sum_of(first) : 0, b = first + 1 < n ? sum_of(first + 1) : 0;
    u64 inclusive = warp_inclusive(a + b), before = inclusive - a - b;
    if (inclusive > r && before <= r) {
        bool second = before + a <= r;
        shared.chosen = first + second;
        shared.rest = r - before - (second ? a : 0);
    }
}

// Step 10 with the chunks' sums in shared.chunk_weight: the chunk, its 128 neighbouring tokens (a warp's four each), the
// token.
__device__ __noinline__ inline int draw_from_chunks(u64 cutoff, u64 bits) {
    Shared& shared = finish_memory();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, chunks = shared.rows[DRAWN].chunks;
    if (warp == 0) {
        u64 total = 0;
        for (int chunk = lane; chunk < chunks; chunk += 32) total += shared.chunk_weight[chunk];
        choose_of_64(chunks, __umul64hi(bits, warp_sum(total)), [&](int i) { return shared.chunk_weight[i]; });
    }
    __syncthreads();
    const int chunk = shared.chosen;
    const u64 rest = shared.rest;
    const Candidates row = shared.rows[DRAWN];
    u64* sums = shared.list;  // not needed any more
    static_assert(STRIPS * FINISH_WARPS == 64);
    u64 weights[STRIPS][4];
    float4 x[STRIPS];
    const int start = chunk * CHUNK + threadIdx.x * 4;
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip)
        x[strip] = start + strip * STRIP < row.row.vocab ? load_logits(row.row, start + strip * STRIP) : float4{};
    __syncthreads();  // all have read shared.chosen
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
        const int first = start + strip * STRIP;
        float kept[4] = {x[strip].x, x[strip].y, x[strip].z, x[strip].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            weights[strip][i] = 0;
            if (first + i >= row.row.vocab || make_rank(order_key(kept[i]), first + i) < cutoff) kept[i] = -INFINITY;
        }
        u64 sum = warp_sum(weigh_four(kept, row, shared.fractions, [&](int i, u64 weight) { weights[strip][i] = weight; }));
        if (lane == 0) sums[strip * FINISH_WARPS + warp] = sum;
    }
    __syncthreads();
    if (warp == 0) choose_of_64(STRIPS * FINISH_WARPS, rest, [&](int i) { return sums[i]; });
    __syncthreads();
    const int part = shared.chosen;
    const u64 r = shared.rest;
    __syncthreads();
    if (warp == part % FINISH_WARPS) {
        u64 own[4];
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip)
            if (strip == part / FINISH_WARPS)
                for (int i = 0; i < 4; ++i) own[i] = weights[strip][i];
        u64 sum = own[0] + own[1] + own[2] + own[3], running = warp_inclusive(sum) - sum;
        if (running <= r && r < running + sum) {
            int i = 0;
            if (r >= running + own[0]) i = 1;
            if (r >= running + own[0] + own[1]) i = 2;
            if (r >= running + own[0] + own[1] + own[2]) i = 3;
            shared.chosen = start + part / FINISH_WARPS * STRIP + i;
        }
    }
    __syncthreads();
    return shared.chosen;
}

// ---- the draw --------------------------------------------------------------------------------------------------------

// Steps 8-10 of engine/sampler.py (7, min_p, is the candidates' threshold). chunk_sums: of all candidates.
__device__ __forceinline__ int draw_token(const SlotParams& slot, uint32_t todo, int num_generated, const u64* chunk_sums) {
    Shared& shared = finish_memory();
    const u64 bits = token_bits(slot.seed_low, slot.seed_high, slot.choice, (uint32_t)num_generated), share = slot.top_p_share;
    int bin = BINS;  // where the kept tokens end; BINS: nowhere
    u64 cutoff = 0;
    if (todo & TODO_COUNTS) {
        sum_bins(DRAWN);
        const int count = shared.running_count[BINS - 1], kept = slot.top_k > 0 ? min(slot.top_k, count) : count;
        if (!(todo & TODO_WEIGHTS)) {  // top_k <= LIST
            list_first(DRAWN, kept);
            select_in_whole_list(DRAWN, BY_RANK, 0, false, (u64)kept);
            return draw_from_list(share, bits);
        }
        u64 total = shared.running_weight[BINS - 1];
        if (kept < count) {
            find_bin(false, (u64)kept);
            cut_bin(DRAWN, false, (u64)kept);
            bin = shared.bin, cutoff = shared.cut.key, total = shared.cut.weight;
            __syncthreads();
        }
        const u64 target = share < NO_TOP_P ? nucleus_target(share, total) : total;
        if (target < total) {
            find_bin(true, target);
            bin = shared.bin;
            if (shared.running_count[bin] <= LIST) {
                mark_chunks(DRAWN, 0, bin);
                gather(DRAWN, 0, shared.num_marked, 0, bin, cutoff, ~0ull);
                if (threadIdx.x == 0) shared.cut = {0, total, 0};
                __syncthreads();
                return draw_from_list(share, bits);
            }
            cut_bin(DRAWN, true, target);
            cutoff = shared.cut.key;
        }
    }
    if (bin == BINS) {
        const int chunks = shared.rows[DRAWN].chunks;
        for (int chunk = threadIdx.x; chunk < chunks; chunk += FINISH_THREADS) shared.chunk_weight[chunk] = chunk_sums[chunk];
    } else {
        sum_kept(bin, cutoff);
    }
    __syncthreads();
    return draw_from_chunks(cutoff, bits);
}

// ---- the k best ------------------------------------------------------------------------------------------------------

// The `num_best` first of the raw ranking, in order, to the start of shared.list; 0 < num_best <= LIST.
__device__ __noinline__ inline void find_best(int num_best) {
    Shared& shared = finish_memory();
    __syncthreads();
    sum_bins(RAW);
    list_first(RAW, num_best);
    select_in_whole_list(RAW, BY_RANK, 0, false, (u64)num_best);
    // Those before the cut to the front, then sorted.
    const u64 lowest = shared.cut.key;
    const int size = shared.list_size;
    if (threadIdx.x == 0) shared.num_few = 0;
    u64 mine[LIST / FINISH_THREADS];
#pragma unroll
    for (int i = 0; i < LIST / FINISH_THREADS; ++i)
        mine[i] = threadIdx.x + i * FINISH_THREADS < size ? shared.list[threadIdx.x + i * FINISH_THREADS] : 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < LIST / FINISH_THREADS; ++i)
        if (mine[i] != 0 && mine[i] >= lowest) shared.list[atomicAdd(&shared.num_few, 1)] = mine[i];
    int padded = 2;
    while (padded < num_best) padded *= 2;
    for (int i = num_best + threadIdx.x; i < padded; i += FINISH_THREADS) shared.list[i] = 0;
    __syncthreads();
    for (int span = 2; span <= padded; span *= 2) {  // bitonic (Batcher 1968), descending
        for (int step = span / 2; step > 0; step /= 2) {
            for (int pair = threadIdx.x; pair < padded / 2; pair += FINISH_THREADS) {
                int i = 2 * pair - (pair & (step - 1)), j = i + step;
                u64 a = shared.list[i], b = shared.list[j];
                if ((a < b) == ((i & span) == 0)) {
                    shared.list[i] = b;
                    shared.list[j] = a;
                }
            }
            __syncthreads();
        }
    }
}
