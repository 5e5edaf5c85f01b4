// One token for every row of logits: engine/sampler.py on the device, the same tokens and the same logprob doubles.
//
//   sampler_update   the host's new or changed slots
//   sampler_top      grid (any, rows): maximum of a row, split over blocks. The last block of a row to arrive finishes it
//                    if it is greedy without logprobs, reports it if it has NaN, +inf or only -inf, or says what to do
//   sampler_weigh    grid (chunks of 8192 tokens, rows): weights of the rows that draw or want logprobs, by bins of logits
//   sampler_finish   grid (rows): where top_k and top_p end, the draw, the k best
//
// A row may be split over any number of blocks because nothing but maxima of ranks (distinct) and sums of integers
// crosses a border; so the split never shows in a result. No state is left between steps except `seen`, the counts that
// penalties need: the kernel counts what it samples, so that the next step can be launched before the host knows.
#include "sampler_draw.cuh"

// ---- sampler_update --------------------------------------------------------------------------------------------------

struct SlotUpdate {  // 128 bytes, sampler.py:SLOT_UPDATE
    SlotParams params;
    int32_t slot;
    int32_t clears;                    // forget what `seen` says of the slot
    int32_t num_edits, edits;          // SlotEdit each; where they start in the buffer, in words
    int32_t num_words, words;          // (id, word of `seen`) each
    int32_t pad[6];
};
static_assert(sizeof(SlotUpdate) == 128);
constexpr int UPDATE_THREADS = 256;

// grid (any, updates). buffer: the SlotUpdates, then their lists. Each block owns a range of ids.
extern "C" __global__ void __launch_bounds__(UPDATE_THREADS)
sampler_update(const Common common, const int32_t* buffer, SlotParams* params, SlotEdit* edits, int max_edits, uint32_t* seen, int vocab) {
    begin_kernel(common);
    ptx::wait_for_previous();
    const SlotUpdate& update = reinterpret_cast<const SlotUpdate*>(buffer)[blockIdx.y];
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) params[update.slot] = update.params;
        const SlotEdit* from = reinterpret_cast<const SlotEdit*>(buffer + update.edits);
        for (int i = threadIdx.x; i < update.num_edits; i += UPDATE_THREADS) edits[(int64_t)update.slot * max_edits + i] = from[i];
    }
    int stride = (vocab + 3) & ~3, share = (stride + gridDim.x - 1) / gridDim.x;
    int begin = min((int)blockIdx.x * share, stride), end = min(begin + share, stride);
    uint32_t* row = seen + (int64_t)update.slot * stride;
    if (update.clears)
        for (int id = begin + threadIdx.x; id < end; id += UPDATE_THREADS) row[id] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < update.num_words; i += UPDATE_THREADS) {
        int id = buffer[update.words + 2 * i];
        if (id >= begin && id < end) row[id] = (uint32_t)buffer[update.words + 2 * i + 1];
    }
}

// ---- sampler_top -----------------------------------------------------------------------------------------------------

constexpr int TOP_THREADS = 256, TOP_WARPS = 8, TOP_LOADS = 2;

// Rank of the best logit; with NaN, of one of them.
struct Best {
    float value = -INFINITY;
    int id = 0;

    // Four neighbours, ids ascending from call to call. Once the maximum has been met, one comparison each.
    __device__ __forceinline__ void take(const float4& x, int at, int vocab) {
        if (x.x <= value && x.y <= value && x.z <= value && x.w <= value) return;
        for_four(x, at, vocab, [&](float logit, int token) {
            if (!(logit <= value) && value == value) value = logit, id = token;
        });
    }
    __device__ __forceinline__ u64 rank() const { return make_rank(order_key(value), id); }
};

// Ranks of the best raw logit and of the best edited one among begin..end-1: each thread's.
__device__ __forceinline__ void best_of(const RowView& row, int begin, int end, u64& raw_rank, u64& rank) {
    Best raw, edited;
    for (int start = begin + threadIdx.x * 4; start < end; start += TOP_THREADS * 4 * TOP_LOADS) {
        float4 x[TOP_LOADS];
        uint4 words[TOP_LOADS];
#pragma unroll
        for (int i = 0; i < TOP_LOADS; ++i) {
            int at = start + i * TOP_THREADS * 4;
            x[i] = at < end ? load_raw(row, at) : float4{};
            words[i] = at < end && row.seen != nullptr ? load_words(row, at) : uint4{};
        }
#pragma unroll
        for (int i = 0; i < TOP_LOADS; ++i) {
            int at = start + i * TOP_THREADS * 4;
            if (at >= end) break;
            raw.take(x[i], at, row.vocab);
            if (row.seen != nullptr) edited.take(edit_four(x[i], words[i], row), at, row.vocab);
        }
    }
    raw_rank = raw.rank();
    rank = row.seen != nullptr ? edited.rank() : raw_rank;
}

// What is wrong with a row whose maximum is NaN, +inf or -inf (engine/sampler.py:_what_is_wrong). All threads.
__device__ __noinline__ inline RowResult what_is_wrong(const float* logits, int vocab, uint32_t top_key) {
    __shared__ uint32_t count, first;
    if (threadIdx.x == 0) count = 0, first = ~0u;
    __syncthreads();
    for (int id = threadIdx.x; id < vocab; id += TOP_THREADS) {
        if (order_key(logits[id]) == top_key) {
            atomicAdd(&count, 1u);
            atomicMin(&first, (uint32_t)id);
        }
    }
    __syncthreads();
    RowError error = top_key == KEY_NAN ? ROW_NAN : top_key == KEY_POSITIVE_INF ? ROW_POSITIVE_INF : ROW_NEGATIVE_INF;
    return {-1, error, (int32_t)count, (int32_t)first};
}

// What the other kernels have to do for a sampled row with usable logits.
__device__ __forceinline__ uint32_t todo_of(const SlotParams& params, int vocab) {
    uint32_t todo = params.logprobs >= 0 ? TODO_SCORES : 0;
    if (params.flags & SLOT_GREEDY) return todo;
    const bool top_k = params.top_k > 0 && params.top_k < vocab;
    if (top_k || params.top_p_share < NO_TOP_P) todo |= TODO_COUNTS;
    return todo | TODO_DRAW | (top_k && params.top_k <= LIST ? 0 : TODO_WEIGHTS);
}

// results (rows,). logits (rows, ld) fp32, ld a multiple of 4. blockIdx.x takes `share` tokens (a multiple of 4).
extern "C" __global__ void __launch_bounds__(TOP_THREADS)
sampler_top(const Common common, const float* logits, int64_t ld, const RowDescriptor* rows, const SlotParams* params,
            const SlotEdit* edits, int max_edits, uint32_t* seen, RowState* states, int vocab, int share, int32_t* last_token,
            RowResult* results) {
    begin_kernel(common);
    ptx::wait_for_previous();
    const RowDescriptor row = rows[blockIdx.y];
    if (row.mode == ROW_PADDING) return;
    const SamplerSlots slots = {params, edits, seen, max_edits};
    const SlotParams& slot = params[row.slot];
    const bool edited = is_edited(slot, row);
    logits += blockIdx.y * ld;
    RowState& state = states[blockIdx.y];

    __shared__ u64 warp_raw[TOP_WARPS], warp_best[TOP_WARPS];
    __shared__ int is_last;
    u64 raw_best, best;
    int begin = blockIdx.x * share;
    best_of(view_of(logits, vocab, slots, row, edited), begin, min(begin + share, vocab), raw_best, best);
    raw_best = warp_max(raw_best);
    best = edited ? warp_max(best) : raw_best;
    if ((threadIdx.x & 31) == 0) {
        warp_raw[threadIdx.x >> 5] = raw_best;
        warp_best[threadIdx.x >> 5] = best;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < TOP_WARPS; ++warp) {
            raw_best = warp_raw[warp] > raw_best ? warp_raw[warp] : raw_best;
            best = warp_best[warp] > best ? warp_best[warp] : best;
        }
        atomicMax(&state.raw_best, raw_best);
        if (edited) atomicMax(&state.best, best);
        __threadfence();
        is_last = atomicAdd(&state.arrived, 1u) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) return;

    raw_best = __ldcg(&state.raw_best);
    best = edited ? __ldcg(&state.best) : raw_best;
    // What this kernel itself reports of other rows of the slot (a prompt's) may be there or not yet.
    uint32_t slot_error = common.slot_errors[row.slot] & ~(1u << ERROR_LOGITS), raw_key = rank_key(raw_best);
    RowResult result = {rank_id(best), ROW_OK, 0, 0};
    if (slot_error != 0) {
        result = {-1, ROW_DEVICE, (int32_t)slot_error, 0};
    } else if (raw_key >= KEY_POSITIVE_INF || raw_key == KEY_NEGATIVE_INF) {
        result = what_is_wrong(logits, vocab, raw_key);
    } else if (row.mode == ROW_SCORE) {
        result.token = row.target;
        if (row.target < 0 || row.target >= vocab) result = {-1, ROW_TARGET, 0, row.target};
    } else if (rank_key(best) == KEY_NEGATIVE_INF) {
        result = {-1, ROW_MASKED, 0, 0};
    }
    if (threadIdx.x != 0) return;
    uint32_t todo = 0;
    if (result.error == ROW_OK) todo = row.mode == ROW_SCORE ? TODO_SCORES : todo_of(slot, vocab);
    results[blockIdx.y] = todo == 0 ? result : RowResult{-1, ROW_UNFINISHED, 0, 0};
    if (todo == 0) {
        if (result.error == ROW_OK) accept_token(slots, row.slot, result.token, vocab, last_token);
    }
    if (result.error != ROW_OK && result.error != ROW_DEVICE)
        report_error(common, ERROR_LOGITS, -1, row.slot, row.position, result.first);
    state.raw_top = rank_value(raw_best);
    state.top = rank_value(best);
    state.token = result.token;
    state.todo = todo;
    state.raw_best = state.best = 0;
    state.arrived = 0;
}

// ---- sampler_weigh and sampler_finish --------------------------------------------------------------------------------

constexpr int CHUNK = 8192, STRIP = FINISH_THREADS * 4;  // tokens of a block of sampler_weigh, and of a round

// Of every row, between the two kernels: sampler.py:SamplerShape.layout. The bins are all zero before and after.
struct RowSums {
    u64* weights;             // (rows, BINS)
    uint32_t *counts, *raw_counts;  // (rows, BINS)
    uint32_t *tops, *raw_tops;      // (rows, groups)
    u64* group_sums;          // (rows, groups)
    int groups;
};

// Candidates of step 7 on, and all tokens as the model left them.
__device__ __forceinline__ void describe_row(Candidates& drawn, Candidates& raw, const float* logits, int vocab, int row_index,
                                             uint32_t todo, const RowDescriptor& row, const SamplerSlots& slots, const RowState& state,
                                             const RowSums& sums) {
    const SlotParams& slot = slots.params[row.slot];
    const float threshold = fmaxf((float)__dadd_rn((double)state.top, __dmul_rn(slot.temperature, slot.floor)), -FLOAT_MAX);
    const int64_t bins = (int64_t)row_index * BINS, groups = (int64_t)row_index * sums.groups;
    drawn = {view_of(logits, vocab, slots, row, is_edited(slot, row)), threshold, make_bins(state.top, threshold),
             softmax_scale((double)state.top, slot.temperature), todo & TODO_WEIGHTS ? sums.weights + bins : nullptr,
             sums.counts + bins, sums.tops + groups, sums.groups};
    raw = {view_of(logits, vocab, slots, row, false), -INFINITY, make_bins(state.raw_top, state.raw_top - 32.0f),
           softmax_scale((double)state.raw_top, 1.0), nullptr, sums.raw_counts + bins, sums.raw_tops + groups, sums.groups};
}

struct ChunkSums {
    SplitSums weights;
    uint32_t counts[BINS], raw_counts[BINS];
    double fractions[64];
};

__device__ __forceinline__ void store_top(uint32_t* tops, int group, const float (&x)[4]) {
    uint32_t top = __reduce_max_sync(0xFFFFFFFF, order_key(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]))));
    if ((threadIdx.x & 31) == 0) tops[group] = top;
}

// grid (chunks, rows).
extern "C" __global__ void __launch_bounds__(FINISH_THREADS, 2)
sampler_weigh(const Common common, const float* logits, int64_t ld, const RowDescriptor* rows, const SlotParams* params,
              const SlotEdit* edits, int max_edits, uint32_t* seen, RowState* states, u64* weights, uint32_t* counts,
              uint32_t* raw_counts, uint32_t* tops, uint32_t* raw_tops, u64* group_sums, int vocab) {
    begin_kernel(common);
    ptx::wait_for_previous();
    RowState& state = states[blockIdx.y];
    const uint32_t todo = state.todo;
    const RowDescriptor row = rows[blockIdx.y];
    if (todo == 0 || row.mode == ROW_PADDING) return;
    const bool draws = todo & TODO_DRAW, has_counts = todo & TODO_COUNTS, weighs = todo & TODO_WEIGHTS, scores = todo & TODO_SCORES;
    const bool ranks = scores && params[row.slot].logprobs > 0;
    const int groups = (vocab + GROUP - 1) / GROUP;
    Candidates drawn, raw;
    describe_row(drawn, raw, logits + blockIdx.y * ld, vocab, blockIdx.y, todo, row, {params, edits, seen, max_edits}, state,
                 {weights, counts, raw_counts, tops, raw_tops, group_sums, groups});
    group_sums += (int64_t)blockIdx.y * groups;
    // Then the two weights of a token are the same.
    const bool same = weighs && drawn.row.seen == nullptr && drawn.scale.temperature == 1.0 && drawn.threshold <= raw.bins.top - 31.5f;

    __shared__ ChunkSums shared;
    const int bin = threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    shared.weights.low[bin] = shared.weights.high[bin] = shared.counts[bin] = shared.raw_counts[bin] = 0;
    if (threadIdx.x < 64) shared.fractions[threadIdx.x] = POWER_FRACTIONS[threadIdx.x];
    __syncthreads();
    u64 total = 0;  // of weights at temperature 1
    const int start = blockIdx.x * CHUNK, end = min(start + CHUNK, vocab), own = threadIdx.x * 4;
    float4 next = start + own < end ? load_raw(raw.row, start + own) : float4{};
#pragma unroll 1
    for (int strip = start; strip < end; strip += STRIP) {
        const int id = strip + own, group = strip / GROUP + warp;
        const bool inside = strip + warp * GROUP < end;  // the group exists
        float x[4] = {next.x, next.y, next.z, next.w};
        if (id + STRIP < end) next = load_raw(raw.row, id + STRIP);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (id + i >= end) x[i] = -INFINITY;  // weighs nothing
        if (ranks) {
            if (inside) store_top(raw.tops, group, x);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (id + i < end) atomicAdd(&shared.raw_counts[bin_of(x[i], raw.bins)], 1u);
        }
        if (scores && !same) total += weigh_four(x, raw, shared.fractions, [](int, u64) {});
        if (!draws) continue;
        if (drawn.row.seen != nullptr && id < end) {
            float4 edited = edit_four({x[0], x[1], x[2], x[3]}, load_words(drawn.row, id), drawn.row);
            x[0] = edited.x, x[1] = edited.y, x[2] = edited.z, x[3] = edited.w;
        }
        if (has_counts) {
            if (inside) store_top(drawn.tops, group, x);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (x[i] >= drawn.threshold) atomicAdd(&shared.counts[bin_of(x[i], drawn.bins)], 1u);
        }
        if (!weighs) continue;
        u64 sum = weigh_four(x, drawn, shared.fractions, [&](int i, u64 weight) {
            if (has_counts) add_split(shared.weights, bin_of(x[i], drawn.bins), weight);
        });
        if (same) total += sum;
        if (!has_counts && inside) {
            sum = warp_sum(sum);
            if (lane == 0) group_sums[group] = sum;
        }
    }
    if (scores) {
        total = warp_sum(total);
        if (lane == 0 && total != 0) atomicAdd(&state.total, total);
    }
    __syncthreads();
    if (has_counts && shared.counts[bin] != 0) {
        atomicAdd(&drawn.counts[bin], shared.counts[bin]);
        if (weighs) atomicAdd(&drawn.weights[bin], split_sum(shared.weights, bin));
    }
    if (ranks && shared.raw_counts[bin] != 0) atomicAdd(&raw.counts[bin], shared.raw_counts[bin]);
}

constexpr int FINISH_SHARED = 92 * 1024;  // sampler.py:_FINISH_SHARED
static_assert(sizeof(Shared) <= FINISH_SHARED);

// grid (rows), dynamic shared memory FINISH_SHARED. `scores`: (rows, scores_bytes).
extern "C" __global__ void __launch_bounds__(FINISH_THREADS, 1)
sampler_finish(const Common common, const float* logits, int64_t ld, const RowDescriptor* rows, const SlotParams* params,
               const SlotEdit* edits, int max_edits, uint32_t* seen, RowState* states, u64* weights, uint32_t* counts,
               uint32_t* raw_counts, uint32_t* tops, uint32_t* raw_tops, u64* group_sums, int vocab, int32_t* last_token,
               RowResult* results, uint8_t* scores, int scores_bytes, int max_logprobs) {
    begin_kernel(common);
    ptx::wait_for_previous();
    RowState& state = states[blockIdx.x];
    const uint32_t todo = state.todo;
    const RowDescriptor row = rows[blockIdx.x];
    if (todo == 0 || row.mode == ROW_PADDING) return;
    Shared& shared = finish_memory();
    const SamplerSlots slots = {params, edits, seen, max_edits};
    const SlotParams& slot = params[row.slot];
    const int groups = (vocab + GROUP - 1) / GROUP;
    logits += blockIdx.x * ld;
    if (threadIdx.x == 0)
        describe_row(shared.rows[DRAWN], shared.rows[RAW], logits, vocab, blockIdx.x, todo, row, slots, state,
                     {weights, counts, raw_counts, tops, raw_tops, group_sums, groups});
    if (threadIdx.x < 64) shared.fractions[threadIdx.x] = POWER_FRACTIONS[threadIdx.x];
    __syncthreads();

    int token = state.token;
    if (todo & TODO_DRAW) token = draw_token(slot, todo, row.num_generated, group_sums + (int64_t)blockIdx.x * groups);
    if (todo & TODO_SCORES) {
        const int num_best = min(min(max(slot.logprobs, 0), vocab), max_logprobs);
        if (num_best > 0) find_best(num_best);
        uint8_t* out = scores + (int64_t)blockIdx.x * scores_bytes;
        int32_t* ids = reinterpret_cast<int32_t*>(out + sizeof(RowScores));
        float* values = reinterpret_cast<float*>(ids + max_logprobs);
        if (threadIdx.x < num_best) {
            int id = rank_id(shared.best[threadIdx.x]);
            ids[threadIdx.x] = id;
            values[threadIdx.x] = logits[id];  // not from the rank: -0 has its own bits
        }
        if (threadIdx.x == 0) *reinterpret_cast<RowScores*>(out) = {state.total, logits[token], state.raw_top, num_best, 0};
    }
    if (threadIdx.x != 0) return;
    results[blockIdx.x] = {token, ROW_OK, 0, 0};
    if (row.mode == ROW_SAMPLE) accept_token(slots, row.slot, token, vocab, last_token);
    state.total = 0;
}
