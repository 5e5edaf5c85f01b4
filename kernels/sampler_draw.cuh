// sampler_finish's parts: the draw and the k best.
#pragma once
#include "sampler_select.cuh"

// ---- random bits -----------------------------------------------------------------------------------------------------

// engine/rng.py:token_bits: Philox4x32-10 (Salmon et al., SC 2011).
__device__ __forceinline__ u64 token_bits(uint32_t seed_low, uint32_t seed_high, uint32_t choice, uint32_t position) {
    uint32_t c0 = position, c1 = choice, c2 = 0, c3 = 0;  // STREAM_SAMPLE = 0
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

// ---- the draw --------------------------------------------------------------------------------------------------------

// Where top_k and then top_p end. shared.cut.bin = BINS: nowhere.
__device__ __noinline__ inline void apply_filters(int top_k, u64 top_p_share) {
    Shared& shared = finish_memory();
    sum_bins(DRAWN);
    if (threadIdx.x == 0) shared.cut = {BINS, 0, 0, ~0ull, 0, 0, 0, 0, 0, shared.running_weight[BINS - 1]};
    __syncthreads();
    if (top_k > 0 && top_k < shared.running_count[BINS - 1]) find_cut(DRAWN, false, (u64)top_k);
    if (top_p_share < (1ull << 53)) {
        u64 target = nucleus_target(top_p_share, shared.cut.weight), total = shared.cut.weight, listed_from = shared.cut.weight_before;
        bool in_list = shared.cut.bin < BINS && target > listed_from;
        __syncthreads();
        if (target < total) {
            if (in_list) pick(DRAWN, true, target);
            else find_cut(DRAWN, true, target);
        }
    }
}

// The weight of every chunk's kept tokens, into shared.chunk_weight.
__device__ __noinline__ inline void sum_kept(const u64* chunk_sums) {
    Shared& shared = finish_memory();
    const Candidates row = shared.rows[DRAWN];
    const Cut cut = shared.cut;
    int lane = threadIdx.x & 31;
    for (int chunk = threadIdx.x >> 5; chunk < row.chunks; chunk += FINISH_WARPS) {
        u64 sum = 0;
        if (cut.bin == BINS) {
            sum = lane == 0 ? chunk_sums[chunk] : 0;
        } else {
            for (int bin = lane; bin < cut.bin; bin += 32) sum += row.chunk_weights[chunk * BINS + bin];
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            shared.chunk_weight.low[chunk] = (uint32_t)sum;
            shared.chunk_weight.high[chunk] = (uint32_t)(sum >> 32);
        }
    }
    __syncthreads();
    if (cut.bin == BINS) return;
    if (cut.split) {  // the list is only a part of the bin
        for_candidates(DRAWN, cut.bin, cut.bin, cut.cutoff, ~0ull, [&](u64, float logit, int id) {
            add_split(shared.chunk_weight, id / CHUNK, softmax_weight(logit, row.scale, shared.fractions));
        });
    } else {
        for (int i = threadIdx.x; i <= cut.index; i += FINISH_THREADS) {
            u64 rank = shared.list[i];
            add_split(shared.chunk_weight, rank_id(rank) / CHUNK, softmax_weight(rank_value(rank), row.scale, shared.fractions));
        }
    }
    __syncthreads();
}

// Of n <= 64 sums in the order of i, the first whose running sum is greater than r: shared.chosen, and in shared.rest what
// is left of r there. The first warp; the block must be brought in step.
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

// Steps 6-10 of engine/sampler.py.
__device__ __noinline__ inline int draw_token(const SlotParams& slot, int num_generated, bool filters, const u64* chunk_sums) {
    Shared& shared = finish_memory();
    const Candidates row = shared.rows[DRAWN];
    if (filters) {
        apply_filters(slot.top_k, slot.top_p_share);
    } else {
        if (threadIdx.x == 0) shared.cut = {BINS, 0, 0, ~0ull, 0, 0, 0, 0, 0, 0};
        __syncthreads();
    }
    sum_kept(chunk_sums);
    const u64 cutoff = shared.cut.bin < BINS ? shared.cut.cutoff : 0;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

    if (warp == 0) {
        u64 total = 0;
        for (int chunk = lane; chunk < row.chunks; chunk += 32) total += split_sum(shared.chunk_weight, chunk);
        total = warp_sum(total);
        u64 bits = token_bits(slot.seed_low, slot.seed_high, slot.choice, (uint32_t)num_generated);
        choose_of_64(row.chunks, __umul64hi(bits, total), [&](int i) { return split_sum(shared.chunk_weight, i); });
    }
    __syncthreads();

    // Inside the chunk: sums of every warp's 128 neighbouring tokens, then of the lanes of the chosen 128.
    const int chunk = shared.chosen;
    const u64 rest = shared.rest;
    __shared__ u64 sums[STRIPS * FINISH_WARPS];
    static_assert(STRIPS * FINISH_WARPS == 64, "choose_of_64");
    auto kept_weights = [&](int strip, int thread, u64(&weights)[4]) {
        int first = chunk * CHUNK + strip * STRIP + thread * 4;
        weights[0] = weights[1] = weights[2] = weights[3] = 0;
        if (first >= row.row.vocab) return (u64)0;
        for_four(load_logits(row.row, first), first, row.row.vocab, [&](float logit, int id) {
            if (logit >= row.threshold && make_rank(order_key(logit), id) >= cutoff)
                weights[id - first] = softmax_weight(logit, row.scale, shared.fractions);
        });
        return weights[0] + weights[1] + weights[2] + weights[3];
    };
    u64 weights[4];
#pragma unroll 1
    for (int strip = 0; strip < STRIPS; ++strip) {
        u64 sum = warp_sum(kept_weights(strip, threadIdx.x, weights));
        if (lane == 0) sums[strip * FINISH_WARPS + warp] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        choose_of_64(STRIPS * FINISH_WARPS, rest, [&](int i) { return sums[i]; });
        __syncwarp();
        const int part = shared.chosen;
        u64 r = shared.rest, own = kept_weights(part / FINISH_WARPS, part % FINISH_WARPS * 32 + lane, weights);
        u64 running = warp_inclusive(own) - own;
        if (running <= r && r < running + own) {
            int i = 0;
            while (running + weights[i] <= r) running += weights[i++];
            shared.chosen = chunk * CHUNK + part / FINISH_WARPS * STRIP + (part % FINISH_WARPS * 32 + lane) * 4 + i;
        }
    }
    __syncthreads();
    return shared.chosen;
}

// ---- the k best ------------------------------------------------------------------------------------------------------

// The `num_best` first of the ranking, in order, to the start of shared.list; 0 < num_best <= LIST.
__device__ __noinline__ inline void find_best(int num_best) {
    Shared& shared = finish_memory();
    __syncthreads();
    sum_bins(RAW);
    int bin = threadIdx.x;
    if (shared.running_count[bin] >= num_best && (bin == 0 || shared.running_count[bin - 1] < num_best)) shared.chosen = bin;
    __syncthreads();
    const int last = shared.chosen;
    u64 lowest = 0;
    if (shared.running_count[last] > LIST) {
        find_cut(RAW, false, (u64)num_best);
        lowest = shared.cut.cutoff;
    }
    gather(RAW, 0, last, lowest, ~0ull);
}
