// Selection in one row by a block of 512 threads: where a ranking reaches a count or a weight, exactly.
//
// The row has been cut into chunks of 8192 tokens and its candidates (logits >= threshold) into 512 bins of equal width,
// bin 0 at the top; for every chunk and bin sampler_weigh has left the number of candidates and the sum of their weights. Every filter keeps a prefix of the ranking (engine/sampler.py), so it ends at one token: its bin is
// found in the running sums, the few tokens of that bin are gathered and sorted, and the running sums over them give the
// token. A bin with too many tokens to sort (ties) is first split again, by rank, as often as it takes.
#pragma once
#include "sampler_state.cuh"

constexpr int FINISH_THREADS = 512, FINISH_WARPS = 16;
constexpr int BINS = 512;  // = FINISH_THREADS: a thread a bin
constexpr int CHUNK = 8192, STRIP = FINISH_THREADS * 4, STRIPS = CHUNK / STRIP;
constexpr int MAX_CHUNKS = (1 << VOCAB_BITS) / CHUNK;
constexpr int LIST = 2048, LIST_PER_THREAD = LIST / FINISH_THREADS;

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

// Where a filter ends. The list holds, sorted, the tokens around the end.
struct Cut {
    int bin;             // BINS: everything is kept
    int split;           // the bin had to be split: the list is a part of it
    u64 lowest, highest; // ranks of the list
    int count_before, size;
    u64 weight_before;   // of all that rank before the list
    int index;           // of the last kept token in the list
    u64 cutoff;          // its rank
    u64 weight;          // of all kept tokens
};

// Bins of equal width between `top` and `threshold`: any function would do that never decreases as the logit falls.
struct Bins {
    float top, scale;
};
__device__ __forceinline__ Bins make_bins(float top, float threshold) {
    float width = fminf(__fsub_rn(top, threshold), FLOAT_MAX);
    return {top, width > 0.0f ? fminf(__fdiv_rn((float)BINS, width), FLOAT_MAX) : FLOAT_MAX};
}
__device__ __forceinline__ int bin_of(float logit, const Bins& bins) {
    return (int)fminf(__fmul_rn(__fsub_rn(bins.top, logit), bins.scale), (float)(BINS - 1));
}

enum Which { DRAWN, RAW };  // the logits a token is drawn from, and the model's (for logprobs)

struct Candidates {  // a row with the measures of its histograms
    RowView row;
    float threshold;  // -inf: all tokens
    Bins bins;
    SoftmaxScale scale;
    const u64* chunk_weights;      // (chunks, BINS) in global memory; null: only counts matter
    const uint32_t* chunk_counts;  // (chunks, BINS)
    int chunks;
};

struct Shared {
    u64 list[LIST];
    SplitSums weights;  // while a bin is split, by part
    uint32_t counts[BINS];
    u64 running_weight[BINS];  // inclusive, over the whole row
    int running_count[BINS];
    double fractions[64];
    u64 warp_weight[FINISH_WARPS], warp_low[FINISH_WARPS];
    int warp_count[FINISH_WARPS];
    SplitSums chunk_weight;  // kept
    int marked[MAX_CHUNKS], num_marked;
    int list_size;
    Cut cut;
    int chosen;  // chunk, then strip and warp, then token
    u64 rest;
    Candidates rows[2];
};
// One variable for all functions: through a reference argument the compiler would lose that it is shared memory.
__device__ __forceinline__ Shared& finish_memory() {
    __shared__ Shared memory;
    return memory;
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
    for (int i = 0; i < 4; ++i)
        if (passes[i]) f(i, weight[i]);
        else weight[i] = 0;
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

// Inclusive prefix sums over the threads of the block. Ends with the block in step; `weight` and `count` are replaced.
__device__ __forceinline__ void block_inclusive(u64& weight, int& count) {
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
}

// ---- passes over the row ---------------------------------------------------------------------------------------------

// List the chunks that have candidates in the bins first..last.
__device__ __forceinline__ void mark_chunks(Which which, int first, int last) {
    Shared& shared = finish_memory();
    const uint32_t* counts = shared.rows[which].chunk_counts;
    const int chunks = shared.rows[which].chunks, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) shared.num_marked = 0;
    __syncthreads();
    for (int chunk = threadIdx.x >> 5; chunk < chunks; chunk += FINISH_WARPS) {
        bool any = false;
        for (int bin = first + lane; bin <= last; bin += 32) any |= counts[chunk * BINS + bin] != 0;
        any = __ballot_sync(0xFFFFFFFF, any) != 0;
        if (any && lane == 0) shared.marked[atomicAdd(&shared.num_marked, 1)] = chunk;
    }
    __syncthreads();
}

// f(rank, logit, id) for the candidates in bins first..last with lowest <= rank <= highest, in any order.
template <class F>
__device__ __forceinline__ void for_candidates(Which which, int first, int last, u64 lowest, u64 highest, F f) {
    constexpr int LOADS = 8;
    Shared& shared = finish_memory();
    mark_chunks(which, first, last);
    const RowView row = shared.rows[which].row;
    const float threshold = shared.rows[which].threshold;
    const Bins bins = shared.rows[which].bins;
    const int num_strips = shared.num_marked * STRIPS;
    for (int start = 0; start < num_strips; start += LOADS) {
        float4 x[LOADS];
        auto id_of = [&](int i) {
            int strip = start + i;
            return strip < num_strips ? shared.marked[strip / STRIPS] * CHUNK + strip % STRIPS * STRIP + (int)threadIdx.x * 4 : row.vocab;
        };
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            int id = id_of(i);
            x[i] = id < row.vocab ? load_logits(row, id) : float4{};
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            int at = id_of(i);
            if (at >= row.vocab) continue;
            for_four(x[i], at, row.vocab, [&](float logit, int id) {
                if (!(logit >= threshold)) return;
                int bin = bin_of(logit, bins);
                if (bin < first || bin > last) return;
                u64 rank = make_rank(order_key(logit), id);
                if (rank >= lowest && rank <= highest) f(rank, logit, id);
            });
        }
    }
}

// The same candidates into shared.list, at most LIST of them, best first.
__device__ __noinline__ inline void gather(Which which, int first, int last, u64 lowest, u64 highest) {
    Shared& shared = finish_memory();
    if (threadIdx.x == 0) shared.list_size = 0;
    __syncthreads();
    for_candidates(which, first, last, lowest, highest, [&](u64 rank, float, int) {
        int i = atomicAdd(&shared.list_size, 1);
        if (i < LIST) shared.list[i] = rank;
    });
    __syncthreads();
    int size = min(shared.list_size, LIST), padded = 2;
    while (padded < size) padded *= 2;
    for (int i = size + threadIdx.x; i < padded; i += FINISH_THREADS) shared.list[i] = 0;
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

// ---- where the ranking reaches a target ------------------------------------------------------------------------------

// Running sums of the whole row's bins.
__device__ __noinline__ inline void sum_bins(Which which) {
    Shared& shared = finish_memory();
    const Candidates row = shared.rows[which];
    int bin = threadIdx.x, count = 0;
    u64 weight = 0;
    for (int chunk = 0; chunk < row.chunks; ++chunk) {
        count += (int)row.chunk_counts[chunk * BINS + bin];
        if (row.chunk_weights != nullptr) weight += row.chunk_weights[chunk * BINS + bin];
    }
    block_inclusive(weight, count);
    shared.running_weight[bin] = weight;
    shared.running_count[bin] = count;
    __syncthreads();
}

// The one thread where the running sum first reaches the target makes the cut's list its bin (or part).
// count, weight: this thread's inclusive sums.
__device__ __forceinline__ bool reaches(bool by_weight, u64 target, int count, int own_count, u64 weight, u64 own_weight) {
    if (by_weight) return weight >= target && weight - own_weight < target;
    return (u64)count >= target && (u64)(count - own_count) < target;
}

// Split the cut's list into 512 parts by rank and make the one with the target the list.
__device__ __noinline__ inline void split_list(Which which, bool by_weight, u64 target) {
    Shared& shared = finish_memory();
    const Candidates row = shared.rows[which];
    Cut cut = shared.cut;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u64 highest = 0, lowest = ~0ull;
    for_candidates(which, cut.bin, cut.bin, cut.lowest, cut.highest, [&](u64 rank, float, int) {
        highest = rank > highest ? rank : highest;
        lowest = rank < lowest ? rank : lowest;
    });
    highest = warp_max(highest);
    lowest = ~warp_max(~lowest);
    if (lane == 0) {
        shared.warp_weight[warp] = highest;
        shared.warp_low[warp] = lowest;
    }
    shared.counts[threadIdx.x] = shared.weights.low[threadIdx.x] = shared.weights.high[threadIdx.x] = 0;
    __syncthreads();
    for (int i = 0; i < FINISH_WARPS; ++i) {
        highest = shared.warp_weight[i] > highest ? shared.warp_weight[i] : highest;
        lowest = shared.warp_low[i] < lowest ? shared.warp_low[i] : lowest;
    }
    int shift = 0;
    while (((highest - lowest) >> shift) >= BINS) ++shift;
    for_candidates(which, cut.bin, cut.bin, lowest, highest, [&](u64 rank, float logit, int) {
        int part = (int)((highest - rank) >> shift);
        atomicAdd(&shared.counts[part], 1u);
        if (row.chunk_weights != nullptr) add_split(shared.weights, part, softmax_weight(logit, row.scale, shared.fractions));
    });
    __syncthreads();
    int part = threadIdx.x, own_count = (int)shared.counts[part], count = own_count;
    u64 own_weight = split_sum(shared.weights, part), weight = own_weight;
    block_inclusive(weight, count);
    if (reaches(by_weight, target, cut.count_before + count, own_count, cut.weight_before + weight, own_weight)) {
        u64 above = (u64)part << shift, below = above + (1ull << shift) - 1;
        shared.cut.highest = highest - above;
        shared.cut.lowest = below < highest ? highest - below : 0;
        shared.cut.count_before = cut.count_before + count - own_count;
        shared.cut.weight_before = cut.weight_before + weight - own_weight;
        shared.cut.size = own_count;
        shared.cut.split = 1;
    }
    __syncthreads();
}

// Find the token in the (sorted) list where the running sum reaches the target.
__device__ __noinline__ inline void pick(Which which, bool by_weight, u64 target) {
    Shared& shared = finish_memory();
    const Candidates row = shared.rows[which];
    u64 own[LIST_PER_THREAD], weight = 0;
    int first = threadIdx.x * LIST_PER_THREAD, size = shared.cut.size, unused = 0;
    if (row.chunk_weights != nullptr && first < size) {
#pragma unroll
        for (int i = 0; i < LIST_PER_THREAD; ++i) {
            own[i] = first + i < size ? softmax_weight(rank_value(shared.list[first + i]), row.scale, shared.fractions) : 0;
            weight += own[i];
        }
    } else {
#pragma unroll
        for (int i = 0; i < LIST_PER_THREAD; ++i) own[i] = 0;
    }
    u64 inclusive = weight;
    block_inclusive(inclusive, unused);
    u64 running = shared.cut.weight_before + inclusive - weight;
    int count = shared.cut.count_before + first;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < LIST_PER_THREAD; ++i) {
        if (first + i >= size) break;
        running += own[i];
        ++count;
        if (reaches(by_weight, target, count, 1, running, own[i])) {
            shared.cut.index = first + i;
            shared.cut.cutoff = shared.list[first + i];
            shared.cut.weight = running;
        }
    }
    __syncthreads();
}

// The cut where the ranking reaches `target` tokens, or that weight: 0 < target <= all there is. Needs sum_bins.
__device__ __noinline__ inline void find_cut(Which which, bool by_weight, u64 target) {
    Shared& shared = finish_memory();
    int bin = threadIdx.x, count = shared.running_count[bin], own_count = count - (bin > 0 ? shared.running_count[bin - 1] : 0);
    u64 weight = shared.running_weight[bin], own_weight = weight - (bin > 0 ? shared.running_weight[bin - 1] : 0);
    if (reaches(by_weight, target, count, own_count, weight, own_weight))
        shared.cut = {bin, 0, 0, ~0ull, count - own_count, own_count, weight - own_weight, 0, 0, 0};
    __syncthreads();
    while (shared.cut.size > LIST) split_list(which, by_weight, target);
    gather(which, shared.cut.bin, shared.cut.bin, shared.cut.lowest, shared.cut.highest);
    pick(which, by_weight, target);
}
