/* The row-wise ops: RMSNorm, SwiGLU, embedding, exp, and the step between the QKV product and attention.
 * Included once per instruction set after vec.h. The mathematics is in kernels/reference.py. */

/* y = (x * (1 / sqrt(mean(x^2) + eps))) * weight */
INLINE void FN(norm_row)(float *y, const float *x, const float *weight, int64_t n, float eps) {
    v8 sum = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        v8 v = FN(load)(x + i);
        sum = FN(fma)(v, v, sum);
    }
    if (i < n) {
        v8 v = FN(load_part)(x + i, n - i);
        sum = FN(fma)(v, v, sum);
    }
    float scale = 1.0f / sqrtf(FN(hsum)(sum) / (float)n + eps);
    for (i = 0; i < n; i++) y[i] = (x[i] * scale) * weight[i];
}

static void FN(rmsnorm)(void *ctx, int64_t chunk, int slot) {
    const struct rmsnorm_args *a = ctx;
    int64_t end = (chunk + 1) * ROWS_PER_CHUNK < a->rows ? (chunk + 1) * ROWS_PER_CHUNK : a->rows;
    for (int64_t row = chunk * ROWS_PER_CHUNK; row < end; row++) {
        float *x = a->x + row * a->width;
        if (a->residual) {
            const float *r = a->residual + row * a->width;
            for (int64_t i = 0; i < a->width; i++) x[i] += r[i];
        }
        if (a->out) FN(norm_row)(a->out + row * a->width, x, a->weight, a->width, a->eps);
    }
}

/* silu(g) * u = (g / (1 + exp(-g))) * u */
INLINE v8 FN(silu_mul)(v8 g, v8 u) { return (g / (FN(splat)(1.0f) + FN(exp)(-g))) * u; }

static void FN(swiglu)(void *ctx, int64_t chunk, int slot) {
    const struct swiglu_args *a = ctx;
    int64_t end = (chunk + 1) * ROWS_PER_CHUNK < a->rows ? (chunk + 1) * ROWS_PER_CHUNK : a->rows, n = a->width;
    for (int64_t row = chunk * ROWS_PER_CHUNK; row < end; row++) {
        const float *gate = a->gate_up + row * 2 * n, *up = gate + n;
        float *out = a->out + row * n;
        int64_t i = 0;
        for (; i + 8 <= n; i += 8) FN(store)(out + i, FN(silu_mul)(FN(load)(gate + i), FN(load)(up + i)));
        if (i < n)
            FN(store_part)(out + i, FN(silu_mul)(FN(load_part)(gate + i, n - i), FN(load_part)(up + i, n - i)), n - i);
    }
}

static void FN(exp_op)(void *ctx, int64_t chunk, int slot) {
    const struct exp_args *a = ctx;
    int64_t i = 0, n = a->n;
    for (; i + 8 <= n; i += 8) FN(store)(a->out + i, FN(exp)(FN(load)(a->x + i)));
    if (i < n) FN(store_part)(a->out + i, FN(exp)(FN(load_part)(a->x + i, n - i)), n - i);
}

static void FN(embed)(void *ctx, int64_t chunk, int slot) {
    const struct embed_args *a = ctx;
    int64_t end = (chunk + 1) * ROWS_PER_CHUNK < a->rows ? (chunk + 1) * ROWS_PER_CHUNK : a->rows, n = a->width;
    for (int64_t row = chunk * ROWS_PER_CHUNK; row < end; row++) {
        float *out = a->out + row * n;
        if (!a->bf16) {
            memcpy(out, (const float *)a->table + a->ids[row] * n, (size_t)n * sizeof(float));
            continue;
        }
        const uint16_t *src = (const uint16_t *)a->table + a->ids[row] * n;
        int64_t i = 0;
        for (; i + 8 <= n; i += 8) FN(store)(out + i, FN(load_bf16)(src + i));
        if (i < n) FN(store_part)(out + i, FN(load_bf16_part)(src + i, n - i), n - i);
    }
}

/* Rotates (a_i, a_{i + d/2}): the "rotate half" layout of Hugging Face checkpoints. */
INLINE void FN(rope_head)(float *out, const float *in, const float *cos, const float *sin, int64_t head_dim) {
    int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = in[i], b = in[i + half];
        out[i] = a * cos[i] - b * sin[i];
        out[i + half] = b * cos[i] + a * sin[i];
    }
}

static void FN(qkv)(void *ctx, int64_t chunk, int slot) {
    const struct qkv_args *a = ctx;
    const struct kv_args *kv = &a->kv;
    int64_t d = kv->head_dim, heads = kv->num_heads, kv_heads = kv->num_kv_heads, width = (heads + 2 * kv_heads) * d;
    int64_t end = (chunk + 1) * ROWS_PER_CHUNK < kv->tokens ? (chunk + 1) * ROWS_PER_CHUNK : kv->tokens;
    float head[MAX_HEAD_DIM];
    for (int64_t t = chunk * ROWS_PER_CHUNK; t < end; t++) {
        int64_t position = kv->positions[t];
        int64_t page = kv->block_tables[kv->seq_index[t] * kv->max_pages + position / PAGE_TOKENS];
        const float *cos = a->cos + position * (d / 2), *sin = a->sin + position * (d / 2);
        for (int64_t h = 0; h < heads + 2 * kv_heads; h++) {
            const float *in = a->qkv + t * width + h * d, *bias = a->bias ? a->bias + h * d : NULL;
            for (int64_t i = 0; i < d; i++) head[i] = bias ? in[i] + bias[i] : in[i];
            if (h < heads) {
                if (a->q_norm) FN(norm_row)(head, head, a->q_norm, d, a->eps);
                FN(rope_head)(a->q_out + (t * heads + h) * d, head, cos, sin, d);
                continue;
            }
            int64_t kv_head = (h - heads) % kv_heads;
            int64_t slot_offset = ((page * kv_heads + kv_head) * PAGE_TOKENS + position % PAGE_TOKENS) * d;
            if (h < heads + kv_heads) {
                if (a->k_norm) FN(norm_row)(head, head, a->k_norm, d, a->eps);
                FN(rope_head)(kv->k_pages + slot_offset, head, cos, sin, d);
            } else {
                memcpy(kv->v_pages + slot_offset, head, (size_t)d * sizeof(float));
            }
        }
    }
}
