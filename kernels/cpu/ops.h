/* Arguments of the ops as plain C, already checked (module.c), and the table of one instruction set's versions.
 * Shapes and the mathematics: kernels/reference.py. All matrices are row-major and contiguous. */
#ifndef APPLIANCE_OPS_H
#define APPLIANCE_OPS_H

#include <stdint.h>

#define PAGE_TOKENS 128 /* engine/types.py; module.c checks the pools it is given against it */
#define MAX_HEAD_DIM 256

struct rmsnorm_args {
    float *out, *x;
    const float *weight, *residual; /* residual may be NULL; else x += residual first, in place */
    int64_t rows, width;
    float eps;
};

struct matmul_args {
    float *out;       /* (rows, n) */
    const float *x;   /* (rows, k) */
    const void *w;    /* (n, k) float or bf16 bits */
    int64_t rows, n, k;
    int bf16;
    int64_t block_n; /* columns per chunk */
};

struct kv_args { /* the paged pool of one layer and where each token of the batch lives */
    float *k_pages, *v_pages; /* (num_pages, num_kv_heads, PAGE_TOKENS, head_dim) */
    const int32_t *positions, *seq_index, *block_tables; /* (tokens,), (tokens,), (num_seqs, max_pages) */
    int64_t tokens, num_pages, num_seqs, max_pages, num_heads, num_kv_heads, head_dim;
};

struct qkv_args {
    struct kv_args kv;
    float *q_out;                           /* (tokens, num_heads, head_dim) */
    const float *qkv;                       /* (tokens, (num_heads + 2 num_kv_heads) head_dim) */
    const float *bias, *q_norm, *k_norm;    /* each may be NULL */
    const float *cos, *sin;                 /* (max_position, head_dim / 2) */
    float eps;
};

struct attn_block { /* consecutive positions of one sequence */
    int32_t first, count;
};

struct attention_args {
    struct kv_args kv;
    float *out;     /* (tokens, num_heads, head_dim) */
    const float *q; /* (tokens, num_heads, head_dim) */
    int64_t window; /* 0 = none, else a token at p sees max(0, p - window + 1)..p */
    float scale;
    const struct attn_block *blocks;
    int64_t num_blocks, splits; /* splits: chunks per KV head, each with heads_per_chunk query heads */
    int64_t heads_per_chunk, max_block, score_stride;
};

struct swiglu_args {
    float *out;           /* (rows, width) */
    const float *gate_up; /* (rows, 2 width) */
    int64_t rows, width;
};

struct embed_args {
    float *out; /* (rows, width) */
    const void *table;
    const int32_t *ids;
    int64_t rows, width;
    int bf16;
};

struct exp_args {
    float *out;
    const float *x;
    int64_t n;
};

struct isa {
    const char *name;
    void (*rmsnorm)(void *, int64_t, int), (*matmul)(void *, int64_t, int), (*qkv)(void *, int64_t, int),
        (*attention)(void *, int64_t, int), (*swiglu)(void *, int64_t, int), (*embed)(void *, int64_t, int),
        (*exp)(void *, int64_t, int);
};

#define ROWS_PER_CHUNK 4 /* of the row-wise ops */

#endif
