/* kernels._cpu: the CPU ops as Python functions. Call through kernels/cpu_ops.py, which names the arguments.
 *
 * Reading order: vec.h (the canonical order of every sum), matmul.h, rows.h, attention.h (the ops), pool.h (threads),
 * args.h (checks), this file (one function per op: take, check, run without the GIL). */
#include "pool.h"

#include "args.h"

#include "ops.h"

#include <math.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi" /* v8 never crosses a call: every helper is always_inline */

#define ISA_SUFFIX generic
#include "isa.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define USE_AVX2
#define ISA_SUFFIX avx2
#include "isa.h"
#undef USE_AVX2
#pragma GCC pop_options
#endif

static const struct isa *isa; /* chosen once at import; changed only by set_isa (tests) */

static const struct isa *find_isa(const char *name) {
    if (!strcmp(name, "generic")) return &isa_generic;
#if defined(__x86_64__)
    if (!strcmp(name, "avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &isa_avx2;
#endif
    return NULL;
}

#define ARGS(n)                                                                                       \
    if (nargs != (n)) return PyErr_Format(PyExc_TypeError, "%s: %zd arguments; wanted %d", a.op, nargs, (n))

static int64_t row_chunks(int64_t rows) { return (rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK; }

static int run(struct arrays *a, int threads, chunk_fn fn, void *ctx, int64_t chunks, size_t scratch) {
    int rc;
    (void)a;
    Py_BEGIN_ALLOW_THREADS rc = pool_run(threads, fn, ctx, chunks, scratch);
    Py_END_ALLOW_THREADS return rc;
}

/* rmsnorm(out, x, weight, residual | None, eps, num_threads); with a residual x is updated in place */
static PyObject *py_rmsnorm(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    struct arrays a = {.op = "rmsnorm"};
    ARGS(6);
    Py_buffer *out, *x, *weight, *residual = NULL;
    struct rmsnorm_args op = {0};
    int threads, add = args[3] != Py_None;
    if (!(out = take(&a, args[0], "out", "f", 2, 1)) || !(x = take(&a, args[1], "x", "f", 2, add)) ||
        !(weight = take(&a, args[2], "weight", "f", 1, 0)) ||
        (add && !(residual = take(&a, args[3], "residual", "f", 2, 0))) || take_float(args[4], &op.eps) ||
        take_threads(&a, args[5], &threads) || want(&a, out, 0, x->shape[0]) || want(&a, out, 1, x->shape[1]) ||
        want(&a, weight, 0, x->shape[1]) ||
        (residual && (want(&a, residual, 0, x->shape[0]) || want(&a, residual, 1, x->shape[1]))) || no_overlap(&a))
        return fail(&a);
    op.out = out->buf, op.x = x->buf, op.weight = weight->buf, op.residual = residual ? residual->buf : NULL;
    op.rows = x->shape[0], op.width = x->shape[1];
    return finish(&a, run(&a, threads, isa->rmsnorm, &op, op.width ? row_chunks(op.rows) : 0, 0));
}

/* add(x, residual, num_threads): x += residual */
static PyObject *py_add(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    struct arrays a = {.op = "add"};
    ARGS(3);
    Py_buffer *x, *residual;
    struct rmsnorm_args op = {0};
    int threads;
    if (!(x = take(&a, args[0], "x", "f", 2, 1)) || !(residual = take(&a, args[1], "residual", "f", 2, 0)) ||
        take_threads(&a, args[2], &threads) || want(&a, residual, 0, x->shape[0]) ||
        want(&a, residual, 1, x->shape[1]) || no_overlap(&a))
        return fail(&a);
    op.x = x->buf, op.residual = residual->buf, op.rows = x->shape[0], op.width = x->shape[1];
    return finish(&a, run(&a, threads, isa->rmsnorm, &op, row_chunks(op.rows), 0));
}

/* matmul(out, x, w, num_threads): out = x w^T */
static PyObject *py_matmul(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    struct arrays a = {.op = "matmul"};
    ARGS(4);
    Py_buffer *out, *x, *w;
    int threads;
    if (!(out = take(&a, args[0], "out", "f", 2, 1)) || !(x = take(&a, args[1], "x", "f", 2, 0)) ||
        !(w = take(&a, args[2], "w", "fb", 2, 0)) || take_threads(&a, args[3], &threads) ||
        want(&a, w, 1, x->shape[1]) || want(&a, out, 0, x->shape[0]) || want(&a, out, 1, w->shape[0]) || no_overlap(&a))
        return fail(&a);
    struct matmul_args op = {.out = out->buf, .x = x->buf, .w = w->buf, .rows = x->shape[0], .n = w->shape[0],
                             .k = x->shape[1], .bf16 = is_bf16(w)};
    /* A block of W that stays in L2 (128 KB) while every tile of rows passes over it; a multiple of 24 columns, so that
     * the tiles of 3 and of 8 come out even; never so large that a thread has nothing to do. */
    int64_t fit = 131072 / (4 * (op.k ? op.k : 1)) / 24 * 24, share = (op.n / (4 * threads) + 23) / 24 * 24;
    op.block_n = fit < share ? fit : share;
    op.block_n = op.block_n < 24 ? 24 : op.block_n;
    size_t scratch = op.bf16 && op.rows > 4 ? (size_t)(op.block_n * op.k) * sizeof(float) : 0;
    int64_t chunks = op.rows ? (op.n + op.block_n - 1) / op.block_n : 0;
    return finish(&a, run(&a, threads, isa->matmul, &op, chunks, scratch));
}

/* swiglu(out, gate_up, num_threads) */
static PyObject *py_swiglu(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    struct arrays a = {.op = "swiglu"};
    ARGS(3);
    Py_buffer *out, *gate_up;
    int threads;
    if (!(out = take(&a, args[0], "out", "f", 2, 1)) || !(gate_up = take(&a, args[1], "gate_up", "f", 2, 0)) ||
        take_threads(&a, args[2], &threads) || want(&a, gate_up, 0, out->shape[0]) ||
        want(&a, gate_up, 1, 2 * out->shape[1]) || no_overlap(&a))
        return fail(&a);
    struct swiglu_args op = {.out = out->buf, .gate_up = gate_up->buf, .rows = out->shape[0], .width = out->shape[1]};
    return finish(&a, run(&a, threads, isa->swiglu, &op, row_chunks(op.rows), 0));
}

/* embed(out, table, ids, num_threads) */
static PyObject *py_embed(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    struct arrays a = {.op = "embed"};
    ARGS(4);
    Py_buffer *out, *table, *ids;
    int threads;
    if (!(out = take(&a, args[0], "out", "f", 2, 1)) || !(table = take(&a, args[1], "table", "fb", 2, 0)) ||
        !(ids = take(&a, args[2], "ids", "i", 1, 0)) || take_threads(&a, args[3], &threads) ||
        want(&a, out, 0, ids->shape[0]) || want(&a, out, 1, table->shape[1]) || no_overlap(&a))
        return fail(&a);
    struct embed_args op = {.out = out->buf, .table = table->buf, .ids = ids->buf, .rows = ids->shape[0],
                            .width = table->shape[1], .bf16 = is_bf16(table)};
    for (int64_t i = 0; i < op.rows; i++)
        if (op.ids[i] < 0 || op.ids[i] >= table->shape[0]) {
            PyErr_Format(PyExc_IndexError, "embed: token id %d at index %zd is outside the vocabulary of %zd", op.ids[i],
                         (Py_ssize_t)i, table->shape[0]);
            return fail(&a);
        }
    return finish(&a, run(&a, threads, isa->embed, &op, row_chunks(op.rows), 0));
}

/* exp(out, x): for the test of its stated error */
static PyObject *py_exp(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    struct arrays a = {.op = "exp"};
    ARGS(2);
    Py_buffer *out, *x;
    if (!(out = take(&a, args[0], "out", "f", 1, 1)) || !(x = take(&a, args[1], "x", "f", 1, 0)) ||
        want(&a, out, 0, x->shape[0]) || no_overlap(&a))
        return fail(&a);
    struct exp_args op = {.out = out->buf, .x = x->buf, .n = x->shape[0]};
    return finish(&a, run(&a, 1, isa->exp, &op, 1, 0));
}

/* The arrays every op on the paged pool shares: k_pages, v_pages, positions, seq_index, block_tables = args[0..4]. */
static int take_kv(struct arrays *a, PyObject *const *args, struct kv_args *kv, int writable) {
    Py_buffer *k, *v, *positions, *seq_index, *tables;
    if (!(k = take(a, args[0], "k_pages", "f", 4, writable)) || !(v = take(a, args[1], "v_pages", "f", 4, writable)) ||
        !(positions = take(a, args[2], "positions", "i", 1, 0)) ||
        !(seq_index = take(a, args[3], "seq_index", "i", 1, 0)) ||
        !(tables = take(a, args[4], "block_tables", "i", 2, 0)) || want(a, k, 2, PAGE_TOKENS))
        return -1;
    for (int axis = 0; axis < 4; axis++)
        if (want(a, v, axis, k->shape[axis])) return -1;
    if (want(a, seq_index, 0, positions->shape[0])) return -1;
    kv->k_pages = k->buf, kv->v_pages = v->buf, kv->positions = positions->buf, kv->seq_index = seq_index->buf;
    kv->block_tables = tables->buf, kv->tokens = positions->shape[0], kv->num_seqs = tables->shape[0];
    kv->max_pages = tables->shape[1], kv->num_pages = k->shape[0], kv->num_kv_heads = k->shape[1];
    kv->head_dim = k->shape[3];
    if (kv->head_dim < 2 || kv->head_dim > MAX_HEAD_DIM || kv->head_dim % 2 || kv->num_kv_heads < 1) {
        PyErr_Format(PyExc_ValueError, "%s: %zd KV heads of size %zd; wanted at least one, of an even size up to %d", a->op,
                     k->shape[1], k->shape[3], MAX_HEAD_DIM);
        return -1;
    }
    return 0;
}

static int take_heads(const struct arrays *a, struct kv_args *kv, int64_t num_heads) {
    kv->num_heads = num_heads;
    if (num_heads >= 1 && num_heads % kv->num_kv_heads == 0) return 0;
    PyErr_Format(PyExc_ValueError, "%s: %zd query heads are not a multiple of %zd KV heads", a->op, (Py_ssize_t)num_heads,
                 (Py_ssize_t)kv->num_kv_heads);
    return -1;
}

/* Every page that token t will touch (positions first..last) must lie in the pool. */
static int check_pages(const struct arrays *a, const struct kv_args *kv, int64_t t, int64_t first, int64_t last) {
    for (int64_t i = first / PAGE_TOKENS; i <= last / PAGE_TOKENS; i++) {
        int32_t page = kv->block_tables[kv->seq_index[t] * kv->max_pages + i];
        if (page >= 0 && page < kv->num_pages) continue;
        PyErr_Format(PyExc_IndexError, "%s: token %zd needs page %d (entry %zd of block table %d), but the pool has %zd pages",
                     a->op, (Py_ssize_t)t, page, (Py_ssize_t)i, kv->seq_index[t], (Py_ssize_t)kv->num_pages);
        return -1;
    }
    return 0;
}

static int check_token(const struct arrays *a, const struct kv_args *kv, int64_t t, int64_t max_position) {
    int64_t position = kv->positions[t], seq = kv->seq_index[t];
    if (seq < 0 || seq >= kv->num_seqs) {
        PyErr_Format(PyExc_IndexError, "%s: token %zd is of sequence %zd, but there are %zd block tables", a->op,
                     (Py_ssize_t)t, (Py_ssize_t)seq, (Py_ssize_t)kv->num_seqs);
        return -1;
    }
    int64_t limit = kv->max_pages * PAGE_TOKENS < max_position ? kv->max_pages * PAGE_TOKENS : max_position;
    if (position < 0 || position >= limit) {
        PyErr_Format(PyExc_IndexError, "%s: token %zd has position %zd; wanted 0..%zd", a->op, (Py_ssize_t)t,
                     (Py_ssize_t)position, (Py_ssize_t)limit - 1);
        return -1;
    }
    return 0;
}

/* qkv_rope_append(q_out, qkv, bias|None, q_norm|None, k_norm|None, cos, sin, k_pages, v_pages, positions, seq_index,
 * block_tables, eps, num_threads) */
static PyObject *py_qkv(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    struct arrays a = {.op = "qkv_rope_append"};
    ARGS(14);
    struct qkv_args op = {0};
    struct kv_args *kv = &op.kv;
    Py_buffer *q_out, *qkv, *cos, *sin, *optional[3] = {0};
    const char *names[3] = {"bias", "q_norm", "k_norm"};
    int threads;
    if (!(q_out = take(&a, args[0], "q_out", "f", 3, 1)) || !(qkv = take(&a, args[1], "qkv", "f", 2, 0))) return fail(&a);
    for (int i = 0; i < 3; i++)
        if (args[2 + i] != Py_None && !(optional[i] = take(&a, args[2 + i], names[i], "f", 1, 0))) return fail(&a);
    if (!(cos = take(&a, args[5], "cos", "f", 2, 0)) || !(sin = take(&a, args[6], "sin", "f", 2, 0)) ||
        take_kv(&a, args + 7, kv, 1) || take_heads(&a, kv, q_out->shape[1]) || take_float(args[12], &op.eps) ||
        take_threads(&a, args[13], &threads))
        return fail(&a);
    int64_t d = kv->head_dim, width = (kv->num_heads + 2 * kv->num_kv_heads) * d;
    if (want(&a, q_out, 0, kv->tokens) || want(&a, q_out, 2, d) || want(&a, qkv, 0, kv->tokens) ||
        want(&a, qkv, 1, width) || (optional[0] && want(&a, optional[0], 0, width)) ||
        (optional[1] && want(&a, optional[1], 0, d)) || (optional[2] && want(&a, optional[2], 0, d)) ||
        want(&a, cos, 1, d / 2) || want(&a, sin, 1, d / 2) || want(&a, sin, 0, cos->shape[0]) || no_overlap(&a))
        return fail(&a);
    for (int64_t t = 0; t < kv->tokens; t++)
        if (check_token(&a, kv, t, cos->shape[0]) || check_pages(&a, kv, t, kv->positions[t], kv->positions[t]))
            return fail(&a);
    op.q_out = q_out->buf, op.qkv = qkv->buf, op.cos = cos->buf, op.sin = sin->buf;
    op.bias = optional[0] ? optional[0]->buf : NULL;
    op.q_norm = optional[1] ? optional[1]->buf : NULL;
    op.k_norm = optional[2] ? optional[2]->buf : NULL;
    return finish(&a, run(&a, threads, isa->qkv, &op, row_chunks(kv->tokens), 0));
}

static int64_t first_visible(int64_t position, int64_t window) {
    return window && position >= window ? position - window + 1 : 0;
}

/* Cuts the batch into blocks of consecutive positions of one sequence; returns the longest span of keys of one block. */
static int64_t cut_blocks(const struct kv_args *kv, int64_t window, int64_t max_block, struct attn_block *blocks, int64_t *n) {
    int64_t longest = 0;
    *n = 0;
    for (int64_t t = 0; t < kv->tokens; t++) {
        struct attn_block *last = *n ? &blocks[*n - 1] : NULL;
        if (last && last->count < max_block && kv->seq_index[t] == kv->seq_index[t - 1] &&
            kv->positions[t] == (int64_t)kv->positions[t - 1] + 1)
            last->count++;
        else
            blocks[(*n)++] = (struct attn_block){.first = (int32_t)t, .count = 1};
        int64_t span = kv->positions[t] + 1 - first_visible(kv->positions[blocks[*n - 1].first], window);
        longest = span > longest ? span : longest;
    }
    return longest;
}

/* paged_attention(out, q, k_pages, v_pages, positions, seq_index, block_tables, window, scale, num_threads) */
static PyObject *py_attention(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    struct arrays a = {.op = "paged_attention"};
    ARGS(10);
    struct attention_args op = {0};
    struct kv_args *kv = &op.kv;
    Py_buffer *out, *q;
    int threads;
    if (!(out = take(&a, args[0], "out", "f", 3, 1)) || !(q = take(&a, args[1], "q", "f", 3, 0)) ||
        take_kv(&a, args + 2, kv, 0) || take_heads(&a, kv, q->shape[1]) || take_float(args[8], &op.scale) ||
        take_threads(&a, args[9], &threads))
        return fail(&a);
    op.window = PyLong_AsLongLong(args[7]);
    if (op.window == -1 && PyErr_Occurred()) return fail(&a);
    if (op.window < 0) {
        PyErr_SetString(PyExc_ValueError, "paged_attention: window must be 0 (none) or positive");
        return fail(&a);
    }
    if (want(&a, q, 0, kv->tokens) || want(&a, q, 2, kv->head_dim) || want(&a, out, 0, kv->tokens) ||
        want(&a, out, 1, kv->num_heads) || want(&a, out, 2, kv->head_dim) || no_overlap(&a))
        return fail(&a);
    if (kv->tokens > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "paged_attention: more than 2^31-1 tokens in one batch");
        return fail(&a);
    }
    for (int64_t t = 0; t < kv->tokens; t++)
        if (check_token(&a, kv, t, INT32_MAX) ||
            check_pages(&a, kv, t, first_visible(kv->positions[t], op.window), kv->positions[t]))
            return fail(&a);
    if (!kv->tokens) return finish(&a, 0);
    struct attn_block *blocks = malloc((size_t)kv->tokens * sizeof *blocks);
    if (!blocks) return finish(&a, ENOMEM);
    /* About 48 rows of scores at a time, in fours for the tiles; fewer when the context is so long that they would leave
     * L2 by far. */
    int64_t group = kv->num_heads / kv->num_kv_heads, dp = (kv->head_dim + 7) / 8 * 8;
    int64_t longest = cut_blocks(kv, op.window, 1, blocks, &op.num_blocks);
    int64_t by_rows = 48 / group > 4 ? 48 / group / 4 * 4 : 48 / group, by_bytes = (1 << 21) / (4 * longest * group);
    op.max_block = by_rows < by_bytes ? by_rows : by_bytes;
    op.max_block = op.max_block < 1 ? 1 : op.max_block;
    longest = cut_blocks(kv, op.window, op.max_block, blocks, &op.num_blocks);
    op.heads_per_chunk = group < 32 ? group : 32;
    if (threads > 1 && op.num_blocks * kv->num_kv_heads < 4 * threads) op.heads_per_chunk = 1; /* a lone decode */
    op.splits = (group + op.heads_per_chunk - 1) / op.heads_per_chunk;
    op.score_stride = (longest + 7) / 8 * 8;
    op.out = out->buf, op.q = q->buf, op.blocks = blocks;
    size_t rows = (size_t)(op.max_block * op.heads_per_chunk);
    size_t scratch = rows * (size_t)(2 * dp + op.score_stride) * sizeof(float);
    int rc = run(&a, threads, isa->attention, &op, op.num_blocks * kv->num_kv_heads * op.splits, scratch);
    free(blocks);
    return finish(&a, rc);
}

/* check_tokens(k_pages, v_pages, positions, seq_index, block_tables, window, max_position): the checks of the two ops above
 * for a whole step, before its first layer writes anything */
static PyObject *py_check(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    struct arrays a = {.op = "check_tokens"};
    ARGS(7);
    struct kv_args kv = {0};
    if (take_kv(&a, args, &kv, 1)) return fail(&a);
    int64_t window = PyLong_AsLongLong(args[5]);
    if (window == -1 && PyErr_Occurred()) return fail(&a);
    int64_t max_position = PyLong_AsLongLong(args[6]);
    if (max_position == -1 && PyErr_Occurred()) return fail(&a);
    for (int64_t t = 0; t < kv.tokens; t++)
        if (check_token(&a, &kv, t, max_position) ||
            check_pages(&a, &kv, t, first_visible(kv.positions[t], window > 0 ? window : 0), kv.positions[t]))
            return fail(&a);
    return finish(&a, 0);
}

static PyObject *py_isa(PyObject *self, PyObject *none) { return PyUnicode_FromString(isa->name); }

static PyObject *py_set_isa(PyObject *self, PyObject *name) {
    const char *text = PyUnicode_AsUTF8(name);
    if (!text) return NULL;
    const struct isa *found = find_isa(text);
    if (!found) return PyErr_Format(PyExc_ValueError, "instruction set %R is unknown or not supported here", name);
    isa = found;
    Py_RETURN_NONE;
}

static PyObject *py_shutdown(PyObject *self, PyObject *none) {
    Py_BEGIN_ALLOW_THREADS pool_shutdown();
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

#define FAST(name, fn) {name, (PyCFunction)(void (*)(void))fn, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    FAST("rmsnorm", py_rmsnorm),
    FAST("add", py_add),
    FAST("matmul", py_matmul),
    FAST("swiglu", py_swiglu),
    FAST("embed", py_embed),
    FAST("exp", py_exp),
    FAST("qkv_rope_append", py_qkv),
    FAST("paged_attention", py_attention),
    FAST("check_tokens", py_check),
    {"isa", py_isa, METH_NOARGS, "Name of the instruction set in use."},
    {"set_isa", py_set_isa, METH_O, "Choose 'avx2' or 'generic' (tests; the bits are the same)."},
    {"shutdown", py_shutdown, METH_NOARGS, "Join the threads and free scratch memory; the next op starts afresh."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kernels._cpu", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__cpu(void) {
    isa = find_isa("avx2");
    if (!isa) isa = &isa_generic;
    return PyModule_Create(&definition);
}
