// The sampler's data: what the host writes (kernels/sampler.py has the same layouts), what stays on the device, what comes
// back; and a row of logits as steps 2-4 of engine/sampler.py leave it.
#pragma once
#include "fixed_softmax.cuh"

constexpr int VOCAB_BITS = 19;  // a vocabulary has fewer than 2^19 tokens (fixed_softmax.py:MAX_VOCAB)
constexpr uint32_t ID_MASK = (1u << VOCAB_BITS) - 1;
constexpr u64 NO_TOP_P = 1ull << 53;  // SlotParams.top_p_share
constexpr float FLOAT_MAX = 3.402823466e+38f;

enum SlotFlags : uint32_t {
    SLOT_GREEDY = 1,
    SLOT_PENALISES = 2,  // the tokens it samples are counted in `seen`
    SLOT_BIASED = 4,
    SLOT_STOPS = 8,  // has ids that min_tokens masks
};

struct SlotParams {  // 80 bytes, sampler.py:SLOT_PARAMS
    double temperature;
    double floor;            // max(-32, ln(min_p)): candidates are logits >= float(top + temperature * floor)
    u64 top_p_share;         // ceil(top_p * 2^53); NO_TOP_P: off
    uint32_t seed_low, seed_high;
    uint32_t choice;
    int32_t top_k;           // 0: off
    int32_t min_tokens;
    int32_t logprobs;        // -1: none, 0: the token's, k: and the k best
    float repetition, frequency, presence;
    uint32_t flags;
    uint32_t pad[4];
};
static_assert(sizeof(SlotParams) == 80);

struct SlotEdit {  // 8 bytes; one for every id with a bias or that is a stop
    float bias;
    uint32_t is_stop;
};

// A word of `seen` (slots, vocab rounded up to 4): what is known of a token in a slot. Rows of slots without penalties,
// bias or stops are never read.
constexpr uint32_t SEEN_IN_PROMPT = 1u << 31;       // only where repetition_penalty is on
constexpr uint32_t SEEN_EDIT_SHIFT = 20;            // bits 20..30: 1 + index of its SlotEdit, or 0
constexpr uint32_t SEEN_COUNT_MASK = (1u << 20) - 1;  // how often it is in the output

enum RowMode : int32_t {
    ROW_PADDING = 0,
    ROW_SAMPLE = 1,
    ROW_SCORE = 2,  // logprob of `target` (echo); nothing is sampled
};

struct RowDescriptor {  // 20 bytes, sampler.py:ROW_DESCRIPTOR
    int32_t slot;
    int32_t num_generated;
    int32_t mode;
    int32_t target;
    int32_t position;  // of the token that is chosen; for reports
};

enum RowError : uint32_t {
    ROW_OK = 0,
    ROW_NAN = 1,           // count, first
    ROW_POSITIVE_INF = 2,  // count, first
    ROW_NEGATIVE_INF = 3,  // all of them
    ROW_MASKED = 4,        // min_tokens leaves no finite logit
    ROW_DEVICE = 5,        // an earlier kernel has marked the slot: count = slot_errors
    ROW_TARGET = 6,        // the target of a scoring row is outside the vocabulary: first = target
    ROW_UNFINISHED = 7,    // the row needs sampler_weigh and sampler_finish
};

struct alignas(16) RowResult {  // 16 bytes, sampler.py:ROW_RESULT
    int32_t token;  // -1 with an error
    uint32_t error;
    int32_t count, first;
};

// sampler.py:row_scores_dtype: for rows with logprobs; followed by `max_logprobs` ids (int32), then their logits (float).
struct RowScores {
    u64 total;   // sum of the weights at temperature 1: log_sum_exp = top + log(total / 2^44)
    float logit, top;
    int32_t num_best;
    int32_t pad;
};

enum Todo : uint32_t {
    TODO_DRAW = 1,
    TODO_COUNTS = 2,   // candidates by bin: top_k or top_p
    TODO_WEIGHTS = 4,  // weights of all candidates; not where top_k leaves few
    TODO_SCORES = 8,
};

// Of one row, between the blocks and the kernels of a step. All zero before and after a step.
struct RowState {  // 64 bytes
    u64 raw_best, best;      // ranks
    u64 total;               // weights of the raw logits at temperature 1
    uint32_t arrived;        // blocks of sampler_top
    uint32_t todo;
    // Left by sampler_top for the kernels after it.
    float raw_top, top;
    int32_t token;           // where it is known already
    uint32_t pad[5];
};
static_assert(sizeof(RowState) == 64);

struct SamplerSlots {
    const SlotParams* params;  // (slots,)
    const SlotEdit* edits;     // (slots, max_edits)
    uint32_t* seen;            // (slots, vocab rounded up to 4)
    int max_edits;
};

// ---- order -----------------------------------------------------------------------------------------------------------

// Monotone: a < b as floats if and only if order_key(a) < order_key(b). -0 equals 0; NaN is above all.
constexpr uint32_t KEY_NAN = 0xFFFFFFFF, KEY_POSITIVE_INF = 0xFF800000, KEY_NEGATIVE_INF = 0x007FFFFF;
__device__ __forceinline__ uint32_t order_key(float value) {
    uint32_t bits = __float_as_uint(__fadd_rn(value, 0.0f));
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return KEY_NAN;
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}
__device__ __forceinline__ float value_of_key(uint32_t key) {
    return __uint_as_float(key & 0x80000000 ? key ^ 0x80000000 : ~key);
}

// Greater = ranked before: by value descending, then by id ascending. 51 bits, distinct for every token of a row.
__device__ __forceinline__ u64 make_rank(uint32_t key, int id) { return ((u64)key << VOCAB_BITS) | (ID_MASK - (uint32_t)id); }
__device__ __forceinline__ int rank_id(u64 rank) { return (int)(ID_MASK - ((uint32_t)rank & ID_MASK)); }
__device__ __forceinline__ uint32_t rank_key(u64 rank) { return (uint32_t)(rank >> VOCAB_BITS); }
__device__ __forceinline__ float rank_value(u64 rank) { return value_of_key(rank_key(rank)); }

__device__ __forceinline__ u64 warp_max(u64 value) {
    uint32_t high = __reduce_max_sync(0xFFFFFFFF, (uint32_t)(value >> 32));
    uint32_t low = __reduce_max_sync(0xFFFFFFFF, (uint32_t)(value >> 32) == high ? (uint32_t)value : 0u);
    return ((u64)high << 32) | low;
}

// ---- a row of logits -------------------------------------------------------------------------------------------------

struct RowView {
    const float* logits;     // (vocab,), 16-byte aligned, readable up to a multiple of 4
    const uint32_t* seen;    // of the slot; null: the raw logits
    const SlotParams* slot;
    const SlotEdit* edits;   // of the slot
    int vocab;
    bool masks_stops;
};

__device__ __forceinline__ bool masks_stops(const SlotParams& slot, const RowDescriptor& row) {
    return (slot.flags & SLOT_STOPS) && row.num_generated < slot.min_tokens;
}
__device__ __forceinline__ bool is_edited(const SlotParams& slot, const RowDescriptor& row) {
    return row.mode == ROW_SAMPLE && (masks_stops(slot, row) || (slot.flags & (SLOT_PENALISES | SLOT_BIASED)));
}

// `logits` of the row as the model left them, or (edited) as steps 2-4 make them.
__device__ __forceinline__ RowView view_of(const float* logits, int vocab, const SamplerSlots& slots, const RowDescriptor& row,
                                           bool edited) {
    const SlotParams& slot = slots.params[row.slot];
    return {logits, edited ? slots.seen + (int64_t)row.slot * ((vocab + 3) & ~3) : nullptr, &slot,
            slots.edits + (int64_t)row.slot * slots.max_edits, vocab, masks_stops(slot, row)};
}

// A huge but finite logit stays finite, -inf stays -inf (engine/sampler.py:_saturate).
__device__ __forceinline__ float saturate_logit(float value, float old) {
    return old == -INFINITY ? old : fminf(fmaxf(value, -FLOAT_MAX), FLOAT_MAX);
}

// Steps 2-4 for one token: bias, min_tokens, penalties; fp32, each operation rounded once. `seen` is not 0.
__device__ __noinline__ inline float edit_logit(float logit, uint32_t seen, const SlotParams* slot, const SlotEdit* edits, bool masks) {
    uint32_t edit = (seen >> SEEN_EDIT_SHIFT) & 0x7FF;
    if (edit != 0) {
        SlotEdit entry = edits[edit - 1];
        logit = saturate_logit(__fadd_rn(logit, entry.bias), logit);
        if (entry.is_stop && masks) logit = -INFINITY;
    }
    uint32_t count = seen & SEEN_COUNT_MASK;
    if (count == 0 && !(seen & SEEN_IN_PROMPT)) return logit;
    float value = logit;
    if (slot->repetition != 1.0f) {
        value = value > 0.0f ? __fdiv_rn(value, slot->repetition) : __fmul_rn(value, slot->repetition);
        value = saturate_logit(value, logit);
    }
    if (slot->frequency != 0.0f) value = __fsub_rn(value, __fmul_rn(slot->frequency, (float)count));
    if (slot->presence != 0.0f && count > 0) value = __fsub_rn(value, slot->presence);
    return saturate_logit(value, logit);
}

__device__ __forceinline__ float edited_logit(float logit, uint32_t seen, const RowView& row) {
    return seen == 0 ? logit : edit_logit(logit, seen, row.slot, row.edits, row.masks_stops);
}

// Four neighbouring tokens; `id` is a multiple of 4 below vocab. What lies beyond the vocabulary is unspecified.
__device__ __forceinline__ float4 load_raw(const RowView& row, int id) { return *reinterpret_cast<const float4*>(row.logits + id); }
__device__ __forceinline__ uint4 load_words(const RowView& row, int id) { return *reinterpret_cast<const uint4*>(row.seen + id); }
__device__ __forceinline__ float4 edit_four(float4 x, const uint4& words, const RowView& row) {
    if ((words.x | words.y | words.z | words.w) == 0) return x;
    x.x = edited_logit(x.x, words.x, row);
    x.y = edited_logit(x.y, words.y, row);
    x.z = edited_logit(x.z, words.z, row);
    x.w = edited_logit(x.w, words.w, row);
    return x;
}
__device__ __forceinline__ float4 load_logits(const RowView& row, int id) {
    float4 x = load_raw(row, id);
    return row.seen == nullptr ? x : edit_four(x, load_words(row, id), row);
}

// f(logit, id) for those of the four that are in the vocabulary.
template <class F>
__device__ __forceinline__ void for_four(const float4& x, int id, int vocab, F f) {
    f(x.x, id);
    if (id + 1 < vocab) f(x.y, id + 1);
    if (id + 2 < vocab) f(x.z, id + 2);
    if (id + 3 < vocab) f(x.w, id + 3);
}

// The token is the slot's: counted, and the next step's input.
__device__ __forceinline__ void accept_token(const SamplerSlots& slots, int slot, int token, int vocab, int32_t* last_token) {
    last_token[slot] = token;
    if (slots.params[slot].flags & SLOT_PENALISES) slots.seen[(int64_t)slot * ((vocab + 3) & ~3) + token] += 1;
}
