/* Paged attention over any mix of prefill chunks and decode tokens. Included once per instruction set after matmul.h.
 *
 * One chunk of work: a block of consecutive tokens of one sequence x the query heads of one KV head. Per (token, head):
 * scores q.k * scale over the visible positions (each a dot product in the canonical order), their maximum, e = exp(s - max),
 * the sum of e in the canonical order counted from the first visible position, the output sum_j e_j v_j with j ascending
 * (one fused multiply-add each), times 1 / sum. All scores of a row are kept, so there is no rescaling that would depend on
 * how the keys are split. A row never touches a key or value it cannot see: not even a NaN there reaches it. */

struct FN(attn_rows) { /* the rows of one chunk: row = token * heads + head */
    int64_t rows, heads, d, dp, lo, stride; /* dp: d rounded up to 8; lo: first position any row sees */
    float *q, *acc, *scores;                /* (rows, dp), (rows, dp), (rows, stride): score of position lo + i */
    int64_t first_position, window;
};

INLINE int64_t FN(row_last)(const struct FN(attn_rows) *r, int64_t row) { return r->first_position + row / r->heads; }

INLINE int64_t FN(row_first)(const struct FN(attn_rows) *r, int64_t row) {
    int64_t p = FN(row_last)(r, row);
    return r->window && p >= r->window ? p - r->window + 1 : 0;
}

/* Scores in place become exp(s * scale - max); returns 1 / sum. */
INLINE float FN(softmax_row)(float *s, int64_t n, float scale) {
    float max = -INFINITY;
    v8 sc = FN(splat)(scale), vmax = FN(splat)(-INFINITY), sum = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        v8 v = FN(load)(s + i) * sc;
        FN(store)(s + i, v);
        vmax = FN(select)(v > vmax, v, vmax);
    }
    for (int l = 0; l < 8; l++) max = vmax[l] > max ? vmax[l] : max;
    for (int64_t j = i; j < n; j++) {
        s[j] *= scale;
        max = s[j] > max ? s[j] : max;
    }
    for (i = 0; i + 8 <= n; i += 8) {
        v8 e = FN(exp)(FN(load)(s + i) - FN(splat)(max));
        FN(store)(s + i, e);
        sum += e;
    }
    if (i < n) {
        v8 e = FN(exp)(FN(load_part)(s + i, n - i) - FN(splat)(max));
        FN(store_part)(s + i, e, n - i);
        sum += FN(load_part)(s + i, n - i);
    }
    return 1.0f / FN(hsum)(sum);
}

/* acc[i][:] += sum over keys j ascending of e[i][j] * v[j][:], for mr rows and nv vectors of 8 columns. */
INLINE void FN(pv_tile)(const int mr, const int nv, const float *e, int64_t lde, const float *v, int64_t ldv, int64_t keys,
                        float *acc, int64_t ldacc) {
    v8 sum[4][8];
    for (int i = 0; i < mr; i++)
        for (int c = 0; c < nv; c++) sum[i][c] = FN(load)(acc + i * ldacc + 8 * c);
    for (int64_t j = 0; j < keys; j++) {
        v8 vv[8];
#pragma GCC unroll 8
        for (int c = 0; c < nv; c++) vv[c] = FN(load)(v + j * ldv + 8 * c);
#pragma GCC unroll 4
        for (int i = 0; i < mr; i++) {
            v8 ev = FN(splat)(e[i * lde + j]);
#pragma GCC unroll 8
            for (int c = 0; c < nv; c++) sum[i][c] = FN(fma)(ev, vv[c], sum[i][c]);
        }
    }
    for (int i = 0; i < mr; i++)
        for (int c = 0; c < nv; c++) FN(store)(acc + i * ldacc + 8 * c, sum[i][c]);
}

static void FN(pv_part)(const float *e, const float *v, int64_t ldv, int64_t keys, float *acc, int64_t n) {
    v8 sum = FN(load)(acc);
    for (int64_t j = 0; j < keys; j++) sum = FN(fma)(FN(splat)(e[j]), FN(load_part)(v + j * ldv, n), sum);
    FN(store)(acc, sum);
}

/* mr rows that all see the same keys */
INLINE void FN(pv_rows)(const int mr, const float *e, int64_t lde, const float *v, int64_t d, int64_t keys, float *acc,
                        int64_t ldacc) {
    const int nv = mr == 1 ? 8 : mr == 4 ? 3 : 4; /* 8 to 12 independent chains hide the latency of an FMA */
    int64_t c = 0;
    for (; c + 8 * nv <= d; c += 8 * nv) FN(pv_tile)(mr, nv, e, lde, v + c, d, keys, acc + c, ldacc);
    for (; c + 16 <= d; c += 16) FN(pv_tile)(mr, 2, e, lde, v + c, d, keys, acc + c, ldacc);
    for (; c + 8 <= d; c += 8) FN(pv_tile)(mr, 1, e, lde, v + c, d, keys, acc + c, ldacc);
    if (c < d)
        for (int i = 0; i < mr; i++) FN(pv_part)(e + i * lde, v + c, d, keys, acc + i * ldacc + c, d - c);
}

/* Adds positions a..b-1, which lie in one page whose first of them is at v, to every row that sees them. */
static void FN(pv_page)(const struct FN(attn_rows) *r, const float *v, int64_t a, int64_t b) {
    for (int64_t row = 0; row < r->rows;) {
        int64_t mr = r->rows - row < 4 ? r->rows - row : 4;
        int64_t both_first = a, both_end = b; /* what all mr rows see */
        for (int64_t i = row; i < row + mr; i++) {
            int64_t first = FN(row_first)(r, i), end = FN(row_last)(r, i) + 1;
            both_first = first > both_first ? first : both_first;
            both_end = end < both_end ? end : both_end;
        }
        if (both_end < both_first) both_end = both_first = b;
        for (int64_t i = row; i < row + mr; i++) { /* what only some see before that: still ascending per row */
            int64_t first = FN(row_first)(r, i), end = FN(row_last)(r, i) + 1;
            first = first > a ? first : a;
            end = end < both_first ? end : both_first;
            if (first < end)
                FN(pv_rows)(1, r->scores + i * r->stride + first - r->lo, 0, v + (first - a) * r->d, r->d, end - first,
                            r->acc + i * r->dp, 0);
        }
        const float *e = r->scores + row * r->stride + both_first - r->lo, *vb = v + (both_first - a) * r->d;
        float *acc = r->acc + row * r->dp;
        int64_t keys = both_end - both_first;
        if (keys > 0) switch (mr) {
            case 1: FN(pv_rows)(1, e, r->stride, vb, r->d, keys, acc, r->dp); break;
            case 2: FN(pv_rows)(2, e, r->stride, vb, r->d, keys, acc, r->dp); break;
            case 3: FN(pv_rows)(3, e, r->stride, vb, r->d, keys, acc, r->dp); break;
            default: FN(pv_rows)(4, e, r->stride, vb, r->d, keys, acc, r->dp);
            }
        for (int64_t i = row; i < row + mr; i++) { /* and after */
            int64_t first = FN(row_first)(r, i), end = FN(row_last)(r, i) + 1;
            first = first > both_end ? first : both_end;
            end = end < b ? end : b;
            if (first < end)
                FN(pv_rows)(1, r->scores + i * r->stride + first - r->lo, 0, v + (first - a) * r->d, r->d, end - first,
                            r->acc + i * r->dp, 0);
        }
        row += mr;
    }
}

static void FN(attention)(void *ctx, int64_t chunk, int slot) {
    const struct attention_args *a = ctx;
    const struct kv_args *kv = &a->kv;
    int64_t d = kv->head_dim, dp = (d + 7) / 8 * 8, group = kv->num_heads / kv->num_kv_heads;
    chunk = a->num_blocks * kv->num_kv_heads * a->splits - 1 - chunk; /* the longest contexts first: better balance */
    int64_t split = chunk % a->splits, kv_head = chunk / a->splits % kv->num_kv_heads;
    struct attn_block block = a->blocks[chunk / a->splits / kv->num_kv_heads];
    int64_t head0 = split * a->heads_per_chunk;
    int64_t heads = group - head0 < a->heads_per_chunk ? group - head0 : a->heads_per_chunk;
    if (heads <= 0) return;
    head0 += kv_head * group; /* contiguous groups: query head h reads KV head h / group */

    struct FN(attn_rows) r = {.rows = block.count * heads, .heads = heads, .d = d, .dp = dp, .stride = a->score_stride,
                              .first_position = kv->positions[block.first], .window = a->window};
    r.q = pool.scratch[slot];
    r.acc = r.q + a->max_block * a->heads_per_chunk * dp;
    r.scores = r.acc + a->max_block * a->heads_per_chunk * dp;
    r.lo = FN(row_first)(&r, 0);
    int64_t end = FN(row_last)(&r, r.rows - 1) + 1;
    const int32_t *table = kv->block_tables + kv->seq_index[block.first] * kv->max_pages;

    memset(r.q, 0, (size_t)(2 * a->max_block * a->heads_per_chunk * dp) * sizeof(float));
    for (int64_t row = 0; row < r.rows; row++)
        memcpy(r.q + row * dp, a->q + ((block.first + row / heads) * kv->num_heads + head0 + row % heads) * d,
               (size_t)d * sizeof(float));
    for (int64_t p = r.lo, stop; p < end; p = stop) {
        stop = (p / PAGE_TOKENS + 1) * PAGE_TOKENS < end ? (p / PAGE_TOKENS + 1) * PAGE_TOKENS : end;
        int64_t page = table[p / PAGE_TOKENS];
        const float *k = kv->k_pages + ((page * kv->num_kv_heads + kv_head) * PAGE_TOKENS + p % PAGE_TOKENS) * d;
        FN(dot_block)(r.rows, stop - p, r.q, dp, k, d, d, r.scores + p - r.lo, r.stride);
    }
    float inverse[256];
    for (int64_t row = 0; row < r.rows; row++) {
        int64_t first = FN(row_first)(&r, row);
        inverse[row] = FN(softmax_row)(r.scores + row * r.stride + first - r.lo, FN(row_last)(&r, row) + 1 - first, a->scale);
    }
    for (int64_t p = r.lo, stop; p < end; p = stop) {
        stop = (p / PAGE_TOKENS + 1) * PAGE_TOKENS < end ? (p / PAGE_TOKENS + 1) * PAGE_TOKENS : end;
        int64_t page = table[p / PAGE_TOKENS];
        FN(pv_page)(&r, kv->v_pages + ((page * kv->num_kv_heads + kv_head) * PAGE_TOKENS + p % PAGE_TOKENS) * d, p, stop);
    }
    for (int64_t row = 0; row < r.rows; row++) {
        float *out = a->out + ((block.first + row / heads) * kv->num_heads + head0 + row % heads) * d;
        for (int64_t i = 0; i < d; i++) out[i] = r.acc[row * dp + i] * inverse[row];
    }
}
