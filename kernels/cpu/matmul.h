/* y = x W^T in register tiles of dot products. Included once per instruction set after vec.h.
 *
 * A tile of mr rows of x and nr rows of W keeps mr*nr accumulators of 8 lanes in registers; each output element is one
 * accumulator in the canonical order of vec.h, so the shape of the tile never shows in the bits. 4x3 needs 7 loads for 12
 * FMAs, which keeps both FMA ports of a Zen or Skylake core busy; one row takes 8 columns so that 8 independent chains hide
 * the latency while W streams in from memory. */

/* bf16 and prefetch are constants at every call, so the branches vanish. prefetch: where W will be read next. */
INLINE void FN(tile)(const int mr, const int nr, const int bf16, const float *x, int64_t ldx, const void *w_any, int64_t ldw,
                     int64_t k, float *y, int64_t ldy, const char *prefetch) {
    const float *w = w_any;
    const uint16_t *wh = w_any;
    v8 acc[4][8], wv[8];
    for (int i = 0; i < mr; i++)
        for (int j = 0; j < nr; j++) acc[i][j] = (v8){0};
    int64_t kk = 0;
    for (; kk + 8 <= k; kk += 8) {
        if (prefetch)
            for (int line = 0; line < (nr * (bf16 ? 16 : 32) + 63) / 64; line++)
                __builtin_prefetch(prefetch + kk * nr * (bf16 ? 2 : 4) + 64 * line, 0, 3);
#pragma GCC unroll 8
        for (int j = 0; j < nr; j++) wv[j] = bf16 ? FN(load_bf16)(wh + j * ldw + kk) : FN(load)(w + j * ldw + kk);
#pragma GCC unroll 4
        for (int i = 0; i < mr; i++) {
            v8 xv = FN(load)(x + i * ldx + kk);
#pragma GCC unroll 8
            for (int j = 0; j < nr; j++) acc[i][j] = FN(fma)(xv, wv[j], acc[i][j]);
        }
    }
    int64_t rest = k - kk;
    if (rest) {
        for (int j = 0; j < nr; j++)
            wv[j] = bf16 ? FN(load_bf16_part)(wh + j * ldw + kk, rest) : FN(load_part)(w + j * ldw + kk, rest);
        for (int i = 0; i < mr; i++) {
            v8 xv = FN(load_part)(x + i * ldx + kk, rest);
            for (int j = 0; j < nr; j++) acc[i][j] = FN(fma)(xv, wv[j], acc[i][j]);
        }
    }
    if (mr == 4) {
        for (int j = 0; j < nr; j++) FN(hsum4)(acc[0][j], acc[1][j], acc[2][j], acc[3][j], y + j, ldy);
    } else if (nr % 4 == 0) {
        for (int i = 0; i < mr; i++)
            for (int j = 0; j < nr; j += 4)
                FN(hsum4)(acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3], y + i * ldy + j, 1);
    } else {
        for (int i = 0; i < mr; i++)
            for (int j = 0; j < nr; j++) y[i * ldy + j] = FN(hsum)(acc[i][j]);
    }
}

/* Any rows x n in fp32 by 4x3 tiles and their remainders (also the scores of attention). */
#define TILE(mr, nr) \
    FN(tile)(mr, nr, 0, x + i * ldx, ldx, w + j * ldw, ldw, k, y + i * ldy + j, ldy, NULL)
static void FN(dot_block)(int64_t rows, int64_t n, const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t k,
                          float *y, int64_t ldy) {
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) {
        int64_t j = 0;
        for (; j + 3 <= n; j += 3) TILE(4, 3);
        for (; j < n; j++) TILE(4, 1);
    }
    if (rows - i == 3) {
        int64_t j = 0;
        for (; j + 4 <= n; j += 4) TILE(3, 4);
        for (; j < n; j++) TILE(3, 1);
    } else if (rows - i == 2) {
        int64_t j = 0;
        for (; j + 4 <= n; j += 4) TILE(2, 4);
        for (; j < n; j++) TILE(2, 1);
    } else if (rows - i == 1) {
        int64_t j = 0;
        for (; j + 8 <= n; j += 8) TILE(1, 8);
        for (; j < n; j++) TILE(1, 1);
    }
}
#undef TILE

/* One to four rows: memory-bound, so W is read once, in order, with the next tile's rows prefetched. */
INLINE void FN(stream)(const int mr, const int nr, const int bf16, const struct matmul_args *a, int64_t n0, int64_t n1) {
    const int64_t size = bf16 ? 2 : 4, k = a->k;
    const char *w = a->w;
    int64_t j = n0;
    for (; j + nr <= n1; j += nr) {
        int64_t next = j + 2 * nr <= a->n ? j + nr : j; /* never past the end of W */
        FN(tile)(mr, nr, bf16, a->x, k, w + j * k * size, k, k, a->out + j, a->n, w + next * k * size);
    }
    for (; j < n1; j++) FN(tile)(mr, 1, bf16, a->x, k, w + j * k * size, k, k, a->out + j, a->n, NULL);
}

static void FN(matmul)(void *ctx, int64_t chunk, int slot) {
    const struct matmul_args *a = ctx;
    int64_t n0 = chunk * a->block_n, n1 = n0 + a->block_n < a->n ? n0 + a->block_n : a->n, k = a->k;
    switch (a->rows * 2 + a->bf16) {
    case 2: FN(stream)(1, 8, 0, a, n0, n1); return;
    case 3: FN(stream)(1, 8, 1, a, n0, n1); return;
    case 4: FN(stream)(2, 4, 0, a, n0, n1); return;
    case 5: FN(stream)(2, 4, 1, a, n0, n1); return;
    case 6: FN(stream)(3, 4, 0, a, n0, n1); return;
    case 7: FN(stream)(3, 4, 1, a, n0, n1); return;
    case 8: FN(stream)(4, 2, 0, a, n0, n1); return;
    case 9: FN(stream)(4, 2, 1, a, n0, n1); return;
    }
    const float *w;
    if (a->bf16) { /* converted once per block, then used by every tile of rows; the values are the same */
        float *scratch = pool.scratch[slot];
        const uint16_t *wh = (const uint16_t *)a->w + n0 * k;
        int64_t total = (n1 - n0) * k, i = 0;
        for (; i + 8 <= total; i += 8) FN(store)(scratch + i, FN(load_bf16)(wh + i));
        if (i < total) FN(store_part)(scratch + i, FN(load_bf16_part)(wh + i, total - i), total - i);
        w = scratch;
    } else {
        w = (const float *)a->w + n0 * k;
    }
    FN(dot_block)(a->rows, n1 - n0, a->x, k, w, k, k, a->out + n0, a->n);
}
