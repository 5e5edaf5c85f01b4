/* engine.tokenizer._bpe: the compiled encoder. One type, Core, built by core.py from a Spec; pure.py is its oracle.
 *
 * encode: added tokens -> normalizer -> added tokens again -> pre-tokens (_scan.h) -> merges (_merge.h). Everything is
 * linear in the text; only a vocabulary made for it can make a long pre-token O(n log n) (merge_long). The GIL is
 * released for texts of RELEASE_BYTES and more; a Core is immutable, and every call works in a workspace of its own,
 * taken from a small pool.
 *
 * Memory kept between calls: per workspace (POOL_SIZE at most) a cache of 2 MiB, KEEP_BYTES of buffers for all of them,
 * 40 bytes for each token that has ever come out. During a call: 4 bytes for each id, and a copy of the normalized text.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "_map.h"
#include "_merge.h"
#include "_nfc.h"
#include "_scan.h"
#include "_trie.h"

#define RELEASE_BYTES 2048
#define POOL_SIZE 4
#define KEEP_BYTES (32u << 20) /* what the pool may hold on to besides the caches; anything more is freed after the call */
#define MAX_STEPS 16

enum { STEP_PREPEND, STEP_REPLACE, STEP_NFC };
enum { PREFIX_NEVER, PREFIX_FIRST, PREFIX_ALWAYS };

typedef struct { int kind; byte_buffer text, to; } norm_step;
typedef struct {
    PyObject_HEAD
    model model;
    byte_buffer blob;
    uint32_t *offset;
    trie raw, normalized;
    norm_step steps[MAX_STEPS];
    int step_count, digits, split, max_numbers, prefix, meta_replace;
    byte_buffer prefix_text;
    int raw_spaces, prefix_raw; /* see encode_raw_piece */
    uint8_t raw_inside[8192]; /* model.inside for text where spaces stand for U+2581 */
    int32_t single[128]; /* the id of a word of one ASCII character, or -1 */
    PyObject **numbers; /* by id: its int, made when first needed */
    workspace *pool[POOL_SIZE];
    int pooled;
    size_t pooled_bytes;
    unsigned long long last_work;
} Core;

/* ---- workspaces (GIL held) ---------------------------------------------------------------------------------------- */

static void workspace_free(workspace *w) {
    if (!w) return;
    void *owned[] = {w->cache, w->ids.data, w->symbol, w->origin, w->nodes, w->heap, w->now.id, w->now.start, w->next.id,
                     w->next.start, w->pair.id, w->pair.start, w->piece.data, w->other.data, w->text.data, w->spare.data};
    for (size_t i = 0; i < COUNT(owned); i++) free(owned[i]);
    free(w);
}

static workspace *workspace_take(Core *core) {
    workspace *w;
    if (core->pooled) {
        w = core->pool[--core->pooled];
        core->pooled_bytes -= w->bytes;
        return w;
    }
    w = calloc(1, sizeof(workspace));
    if (w && !(w->cache = table_new(sizeof(cache_entry) << CACHE_BITS, 0))) { free(w); w = NULL; }
    if (!w) PyErr_NoMemory();
    return w;
}

static void workspace_return(Core *core, workspace *w) {
    w->bytes = w->capacity * 5 + w->node_capacity * sizeof(node) + w->heap_capacity * 8 + w->piece.capacity +
               w->other.capacity + (w->ids.capacity + w->text.capacity + w->spare.capacity) * 4 +
               (w->now.capacity + w->next.capacity + w->pair.capacity) * 8;
    if (core->pooled == POOL_SIZE || core->pooled_bytes + w->bytes > KEEP_BYTES) {
        workspace_free(w);
        return;
    }
    core->pooled_bytes += w->bytes;
    core->pool[core->pooled++] = w;
}

/* ---- added tokens ------------------------------------------------------------------------------------------------- */

typedef int (*piece_function)(Core *, workspace *, const uint8_t *, size_t, int parse_special, int at_start);

/* Cuts s[0..end-1] at the tokens of `t` and gives the pieces between them to `piece`. */
static int each_piece(Core *core, workspace *w, const trie *t, const uint8_t *s, size_t end, int parse_special,
                      int at_start, piece_function piece) {
    size_t start = 0, at = 0, white_until = 0;
    w->work += end;
    while (t->nodes > 1 && at < end) {
        int64_t token = -1;
        size_t n;
        if (t->only) { /* all of them start alike */
            const uint8_t *found = memchr(s + at, t->only, end - at);
            if (!found) break;
            at = (size_t)(found - s);
        }
        if (!t->starts[s[at]] || !(n = trie_match(t, w, s, at, end, &token))) { at++; continue; }
        size_t first = at, last = at + n;
        uint32_t bytes;
        at = last; /* also when the flags reject the match: as in `tokenizers`, its text is used up */
        if (token & ADDED_SPECIAL && !parse_special) continue;
        if (token & ADDED_SINGLE_WORD && !stands_alone(s, first, last, end)) continue;
        if (token & ADDED_LSTRIP) {
            while (first > start && flags_at(s + char_before(s, first), &bytes) & UC_S) first = char_before(s, first);
            if (first < start) first = start;
        }
        if (token & ADDED_RSTRIP) {
            if (last < white_until) last = white_until; /* known from the token before: never scanned twice */
            while (last < end && flags_at(s + last, &bytes) & UC_S) last += bytes;
            white_until = last;
        }
        if (first >= last) continue; /* all of it is white space that an rstrip before took: as in `tokenizers` */
        if (start < first && piece(core, w, s + start, first - start, parse_special, at_start && !start)) return -1;
        if (ids_add(&w->ids, (uint32_t)(token >> 4))) return -1;
        start = last;
    }
    return start < end ? piece(core, w, s + start, end - start, parse_special, at_start && !start) : 0;
}

/* ---- one piece ---------------------------------------------------------------------------------------------------- */

static int append_replaced(byte_buffer *out, const uint8_t *s, size_t n, const byte_buffer *old, const byte_buffer *new) {
    size_t start = 0;
    while (n - start >= old->size) {
        const uint8_t *found = old->size == 1 ? memchr(s + start, old->data[0], n - start)
                                              : memmem(s + start, n - start, old->data, old->size);
        if (!found) break;
        size_t at = (size_t)(found - s);
        if (bytes_add(out, s + start, at - start) || bytes_add(out, new->data, new->size)) return -1;
        start = at + old->size;
    }
    return bytes_add(out, s + start, n - start);
}

static const byte_buffer space_text = {(uint8_t *)" ", 1, 1}, meta_text = {(uint8_t *)"\xe2\x96\x81", 3, 3};

/* A word that has been cut from the text; its cache line is on the way. */
typedef struct { const uint8_t *p; size_t n; uint64_t hash; } pending;

static int encode_miss(Core *core, workspace *w, const pending *word) {
    const uint8_t *p = word->p;
    size_t n = word->n, start = w->ids.size;
    uint64_t h = word->hash;
    if (core->raw_spaces && memchr(p, ' ', n)) {
        w->piece.size = 0;
        if (append_replaced(&w->piece, p, n, &space_text, &meta_text)) return -1;
        p = w->piece.data; n = w->piece.size;
        h = hash_bytes(p, n, core->model.words.seed);
    }
    if (encode_new(&core->model, w, p, n, h)) return -1;
    if (word->n <= CACHE_KEY) cache_put(w, cache_slot(w, word->hash), word->p, word->n, (uint8_t)word->n, start);
    return 0;
}

static inline int finish_word(Core *core, workspace *w, const pending *word) {
    if (!word->n) return 0;
    const cache_entry *entry = cache_slot(w, word->hash);
    int found = word->n <= CACHE_KEY ? cache_get(w, entry, word->p, word->n, (uint8_t)word->n) : 0;
    return found ? (found < 0 ? -1 : 0) : encode_miss(core, w, word);
}

/* Encodes the word before this one, while the memory that this one needs is fetched. */
static inline int next_word(Core *core, workspace *w, pending *word, const uint8_t *p, size_t n) {
    w->work++;
    if (n == 1 && *p < 0x80 && core->single[*p] >= 0) {
        if (finish_word(core, w, word)) return -1;
        word->n = 0;
        return ids_add(&w->ids, (uint32_t)core->single[*p]);
    }
    pending next = {p, n, hash_bytes(p, n, core->model.words.seed)};
    if (n <= CACHE_KEY) __builtin_prefetch(cache_slot(w, next.hash));
    int failed = finish_word(core, w, word);
    *word = next;
    return failed;
}

/* Metaspace's replacement of spaces and the prefix; then pre-tokens and merges. */
static int encode_piece(Core *core, workspace *w, const uint8_t *s, size_t n, int parse_special, int at_start) {
    int wanted = core->prefix == PREFIX_ALWAYS || (core->prefix == PREFIX_FIRST && at_start);
    if (core->meta_replace || wanted) {
        const byte_buffer *prefix = &core->prefix_text;
        w->other.size = 0;
        int has = n >= prefix->size && !memcmp(s, prefix->data, prefix->size);
        if (core->meta_replace && s[0] == ' ') has = 1;
        if (wanted && !has && bytes_add(&w->other, prefix->data, prefix->size)) return -1;
        if (core->meta_replace ? append_replaced(&w->other, s, n, &space_text, &meta_text) : bytes_add(&w->other, s, n)) return -1;
        s = w->other.data; n = w->other.size;
    }
    pending word = {0};
    for (size_t a = 0; a < n;) {
        size_t stop = core->digits ? digit_span(s, a, n, core->digits == 2, &w->work) : n;
        while (a < stop) {
            size_t end = scan_word(s, a, stop, core->split, (size_t)core->max_numbers, &w->work);
            if (next_word(core, w, &word, s + a, end - a)) return -1;
            a = end;
        }
    }
    return finish_word(core, w, &word);
}

/* The same as normalize_piece and encode_piece where all there is to do is to put U+2581 for spaces (`raw_spaces`):
 * words are cut from the text as it is, where no token reaches across. Only what is not remembered is rewritten. */
static int encode_raw_piece(Core *core, workspace *w, const uint8_t *s, size_t n, int parse_special, int at_start) {
    pending word = {0};
    size_t a = 0;
    int has = core->meta_replace && (s[0] == ' ' || is_meta(s, 0, n));
    if (core->prefix_raw || (!has && (core->prefix == PREFIX_ALWAYS || (core->prefix == PREFIX_FIRST && at_start)))) {
        a = scan_meeting(s, 0, n, core->raw_inside, &w->work);
        w->piece.size = 0;
        if (bytes_add(&w->piece, meta_text.data, meta_text.size) || append_replaced(&w->piece, s, a, &space_text, &meta_text) ||
            encode_new(&core->model, w, w->piece.data, w->piece.size,
                       hash_bytes(w->piece.data, w->piece.size, core->model.words.seed))) return -1;
    }
    while (a < n) {
        size_t end = scan_meeting(s, a, n, core->raw_inside, &w->work);
        if (next_word(core, w, &word, s + a, end - a)) return -1;
        a = end;
    }
    return finish_word(core, w, &word);
}

static int normalize_piece(Core *core, workspace *w, const uint8_t *s, size_t n, int parse_special, int at_start) {
    for (int i = 0; i < core->step_count; i++) {
        const norm_step *step = &core->steps[i];
        w->work += n;
        if (!n || (step->kind == STEP_NFC && nfc_quick_check(s, n))) continue;
        byte_buffer out = w->other; /* the two buffers take turns: `s` may lie in w->piece */
        out.size = 0;
        int failed = 0;
        if (step->kind == STEP_NFC) failed = nfc_append(&out, s, n, &w->text, &w->spare);
        else if (step->kind == STEP_REPLACE) failed = append_replaced(&out, s, n, &step->text, &step->to);
        else failed = bytes_add(&out, step->text.data, step->text.size) || bytes_add(&out, s, n);
        w->work += n;
        w->other = w->piece;
        w->piece = out;
        if (failed) return -1;
        s = out.data; n = out.size;
    }
    return each_piece(core, w, &core->normalized, s, n, parse_special, at_start, encode_piece);
}

/* ---- the Python type ---------------------------------------------------------------------------------------------- */

/* A new reference. Each id becomes one object for as long as the Core lives: at most 40 bytes for each token. */
static inline PyObject *number_of(Core *self, uint32_t id) {
    if (id >= self->model.count) return PyLong_FromUnsignedLong(id); /* an added token beyond the vocabulary */
    if (!self->numbers[id] && !(self->numbers[id] = PyLong_FromUnsignedLong(id))) return NULL;
    return Py_NewRef(self->numbers[id]);
}

static PyObject *Core_encode(Core *self, PyObject *args) {
    const char *text; Py_ssize_t size; int parse_special = 1, failed;
    PyObject *source, *before = NULL, *after = NULL, *list = NULL;
    if (!PyArg_ParseTuple(args, "U|pO!O!", &source, &parse_special, &PyTuple_Type, &before, &PyTuple_Type, &after)) return NULL;
    Py_ssize_t first = before ? PyTuple_GET_SIZE(before) : 0, last = after ? PyTuple_GET_SIZE(after) : 0;
    if (!(text = PyUnicode_AsUTF8AndSize(source, &size))) return NULL; /* lone surrogates: UnicodeEncodeError */
    if (size >= INT32_MAX / 4) { PyErr_SetString(PyExc_OverflowError, "text of 512 MiB or more"); return NULL; }
    workspace *w = workspace_take(self);
    if (!w) return NULL;
    w->ids.size = 0;
    w->work = 0;
    PyThreadState *saved = size >= RELEASE_BYTES ? PyEval_SaveThread() : NULL;
    failed = each_piece(self, w, &self->raw, (const uint8_t *)text, (size_t)size, parse_special, 1,
                        self->raw_spaces ? encode_raw_piece : normalize_piece);
    if (saved) PyEval_RestoreThread(saved);
    if (failed) PyErr_NoMemory();
    else if ((list = PyList_New(first + (Py_ssize_t)w->ids.size + last))) {
        PyObject **item = ((PyListObject *)list)->ob_item;
        few_faults(item, w->ids.size * sizeof(PyObject *));
        for (Py_ssize_t i = 0; i < first; i++) item[i] = Py_NewRef(PyTuple_GET_ITEM(before, i));
        for (Py_ssize_t i = 0; i < last; i++) item[first + (Py_ssize_t)w->ids.size + i] = Py_NewRef(PyTuple_GET_ITEM(after, i));
    }
    for (size_t i = 0; list && i < w->ids.size; i++) {
        PyObject *number = number_of(self, w->ids.data[i]);
        if (!number) { Py_CLEAR(list); break; }
        PyList_SET_ITEM(list, first + (Py_ssize_t)i, number);
    }
    self->last_work = (unsigned long long)w->work;
    workspace_return(self, w);
    return list;
}

static PyObject *Core_nfc(PyObject *type, PyObject *source) {
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(source, &size);
    if (!text) return NULL;
    if (nfc_quick_check((const uint8_t *)text, (size_t)size)) return Py_NewRef(source);
    byte_buffer out = {0};
    id_buffer scratch = {0}, spare = {0};
    int failed = nfc_append(&out, (const uint8_t *)text, (size_t)size, &scratch, &spare);
    PyObject *result = failed ? PyErr_NoMemory() : PyUnicode_DecodeUTF8((char *)out.data, (Py_ssize_t)out.size, NULL);
    free(out.data); free(scratch.data); free(spare.data);
    return result;
}

static PyObject *Core_flags(PyObject *type, PyObject *code) {
    unsigned long c = PyLong_AsUnsignedLong(code);
    if (c == (unsigned long)-1 && PyErr_Occurred()) return NULL;
    if (c > 0x10ffff) { PyErr_SetString(PyExc_ValueError, "not a code point"); return NULL; }
    return PyLong_FromLong(code_flags((uint32_t)c));
}

/* tokens: list of bytes or None, by id. */
static int read_tokens(Core *self, PyObject *tokens, uint64_t seed) {
    Py_ssize_t count = PyList_GET_SIZE(tokens);
    model *m = &self->model;
    if (!(self->numbers = calloc((size_t)count + 1, sizeof(PyObject *)))) goto memory;
    if (!(self->offset = calloc((size_t)count + 1, sizeof(uint32_t))) || !(m->whole = calloc((size_t)count + 1, 1))) goto memory;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *token = PyList_GET_ITEM(tokens, i);
        if (PyBytes_Check(token) &&
            bytes_add(&self->blob, (uint8_t *)PyBytes_AS_STRING(token), (size_t)PyBytes_GET_SIZE(token))) goto memory;
        if (self->blob.size > UINT32_MAX / 2) { PyErr_SetString(PyExc_ValueError, "vocabulary too large"); return -1; }
        self->offset[i + 1] = (uint32_t)self->blob.size;
    }
    m->count = (uint32_t)count;
    if (!words_init(&m->words, self->blob.data, self->offset, m->count, seed)) return 0;
memory:
    PyErr_NoMemory();
    return -1;
}

/* columns: four buffers of u32 of equal length: left, right, merged, rank. */
static int read_merges(Core *self, Py_buffer *columns, uint64_t seed) {
    model *m = &self->model;
    size_t count = (size_t)columns[0].len / 4;
    for (int k = 0; k < 4; k++) {
        if ((size_t)columns[k].len != 4 * count) { PyErr_SetString(PyExc_ValueError, "merge columns differ"); return -1; }
        for (size_t i = 0; k < 3 && i < count; i++)
            if (((uint32_t *)columns[k].buf)[i] >= m->count) { PyErr_SetString(PyExc_ValueError, "merge id"); return -1; }
    }
    const uint32_t *left = columns[0].buf, *right = columns[1].buf, *merged = columns[2].buf, *rank = columns[3].buf;
    if (map64_init(&m->pairs, count, seed)) goto memory;
    for (size_t i = 0; i < count; i++)
        map64_put(&m->pairs, (uint64_t)left[i] << 32 | right[i], (uint64_t)rank[i] << 32 | merged[i]);
    mark_inside(m, left, right, merged, count);
    for (int c = 0; c < 128; c++) {
        uint8_t byte = (uint8_t)c;
        m->ascii_ids[c] = (int32_t)words_find(&m->words, &byte, 1, hash_bytes(&byte, 1, m->words.seed));
    }
    if (!(m->byte_pairs = malloc(65536 * sizeof(uint64_t)))) goto memory;
    for (uint32_t i = 0; i < 65536; i++) {
        uint32_t x = i >> 8, y = i & 255;
        int32_t a = m->byte_level ? m->byte_ids[x] : x < 128 ? m->ascii_ids[x] : -1;
        int32_t b = m->byte_level ? m->byte_ids[y] : y < 128 ? m->ascii_ids[y] : -1;
        m->byte_pairs[i] = a < 0 || b < 0 ? NO_PAIR : map64_get(&m->pairs, (uint64_t)a << 32 | (uint32_t)b, NO_PAIR);
    }
    return 0;
memory:
    PyErr_NoMemory();
    return -1;
}

static int read_steps(Core *self, PyObject *steps) {
    if (PyList_GET_SIZE(steps) > MAX_STEPS) { PyErr_SetString(PyExc_ValueError, "too many normalizer steps"); return -1; }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(steps); i++) {
        norm_step *step = &self->steps[i];
        const char *text, *to; Py_ssize_t text_size, to_size;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(steps, i), "iy#y#", &step->kind, &text, &text_size, &to, &to_size)) return -1;
        if (step->kind == STEP_REPLACE && !text_size) { PyErr_SetString(PyExc_ValueError, "empty pattern"); return -1; }
        if (bytes_add(&step->text, (const uint8_t *)text, (size_t)text_size) ||
            bytes_add(&step->to, (const uint8_t *)to, (size_t)to_size)) { PyErr_NoMemory(); return -1; }
        self->step_count++;
    }
    return 0;
}

/* What only depends on the tokenizer: whether words can be cut from the text as it is, and words of one character. */
static int mark_words(Core *self, workspace *w) {
    const model *m = &self->model;
    const norm_step *step = self->steps;
    const byte_buffer *prefix = &self->prefix_text;
    int left = self->step_count, wanted = self->prefix != PREFIX_NEVER;
    self->prefix_raw = left && step->kind == STEP_PREPEND && step->text.size == 3 && is_meta(step->text.data, 0, 3);
    step += self->prefix_raw; left -= self->prefix_raw;
    int replaces = left == 1 && step->kind == STEP_REPLACE && step->text.size == 1 && *step->text.data == ' ' &&
                   step->to.size == 3 && is_meta(step->to.data, 0, 3);
    self->raw_spaces = self->split == SPLIT_META_RUNS && !self->digits && self->normalized.nodes == 1 &&
                       ((replaces && !self->meta_replace && !wanted) || (!self->step_count && self->meta_replace)) &&
                       (!wanted || (prefix->size == 3 && is_meta(prefix->data, 0, 3)));
    memcpy(self->raw_inside, m->inside, sizeof(m->inside));
    for (uint32_t x = 0; x < 256; x++) {
        /* before a space: SPLIT_META_RUNS says that tokens reach only from one U+2581 to the next (0x81 is its end) */
        set_bit(self->raw_inside, x << 8 | ' ', x == ' ' || x == 0x81);
        if (x != ' ') set_bit(self->raw_inside, ' ' << 8 | x, bit_at(m->inside, 0x81 << 8 | x));
    }
    for (int c = 0; c < 128; c++) {
        const byte_buffer word = self->raw_spaces && c == ' ' ? meta_text : (byte_buffer){(uint8_t[]){(uint8_t)c}, 1, 1};
        w->ids.size = 0;
        if (encode_new(m, w, word.data, word.size, hash_bytes(word.data, word.size, m->words.seed))) return -1;
        self->single[c] = w->ids.size == 1 ? (int32_t)w->ids.data[0] : -1;
    }
    return 0;
}

static int Core_init(Core *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"tokens", "left", "right", "merged", "rank", "byte_ids", "byte_level", "byte_fallback",
                            "fuse_unk", "ignore_merges", "unk_id", "digits", "split", "max_numbers", "prefix",
                            "meta_replace", "prefix_text", "steps", "raw", "normalized", "seed", NULL};
    PyObject *tokens, *steps, *raw, *normalized;
    Py_buffer columns[4] = {{0}}, byte_ids = {0}, prefix = {0};
    unsigned long long seed;
    model *m = &self->model;
    int result = -1;
    if (m->words.slots || self->offset) { PyErr_SetString(PyExc_TypeError, "Core cannot be initialised twice"); return -1; }
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!y*y*y*y*y*ppppiiiiipy*O!O!O!K", names, &PyList_Type, &tokens, &columns[0], &columns[1],
            &columns[2], &columns[3], &byte_ids, &m->byte_level, &m->byte_fallback, &m->fuse_unk, &m->ignore_merges,
            &m->unk_id, &self->digits, &self->split, &self->max_numbers, &self->prefix, &self->meta_replace, &prefix,
            &PyList_Type, &steps, &PyList_Type, &raw, &PyList_Type, &normalized, &seed)) return -1;
    if (byte_ids.len != sizeof(m->byte_ids) || m->unk_id >= PyList_GET_SIZE(tokens)) {
        PyErr_SetString(PyExc_ValueError, "byte_ids or unk_id");
        goto done;
    }
    memcpy(m->byte_ids, byte_ids.buf, sizeof(m->byte_ids));
    if (read_tokens(self, tokens, seed) || read_merges(self, columns, seed) || read_steps(self, steps)) goto done;
    if (trie_build(&self->raw, raw, seed) || trie_build(&self->normalized, normalized, seed)) goto done;
    workspace *w;
    if (bytes_add(&self->prefix_text, prefix.buf, (size_t)prefix.len) || !(w = workspace_take(self))) goto done;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = mark_whole(m, w) || mark_words(self, w);
    Py_END_ALLOW_THREADS
    workspace_return(self, w);
    if (failed) PyErr_NoMemory(); else result = 0;
done:
    for (int k = 0; k < 4; k++) PyBuffer_Release(&columns[k]);
    PyBuffer_Release(&byte_ids);
    PyBuffer_Release(&prefix);
    return result;
}

static void Core_dealloc(Core *self) {
    for (uint32_t id = 0; self->numbers && id < self->model.count; id++) Py_XDECREF(self->numbers[id]);
    free(self->numbers);
    trie *tries[] = {&self->raw, &self->normalized};
    for (int i = 0; i < 2; i++) { map64_free(&tries[i]->edges); free(tries[i]->token); }
    for (int i = 0; i < MAX_STEPS; i++) { free(self->steps[i].text.data); free(self->steps[i].to.data); }
    while (self->pooled) workspace_free(self->pool[--self->pooled]);
    map64_free(&self->model.pairs);
    free(self->model.words.slots);
    free(self->model.byte_pairs);
    free(self->model.whole);
    free(self->prefix_text.data);
    free(self->blob.data);
    free(self->offset);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyMethodDef Core_methods[] = {
    {"encode", (PyCFunction)Core_encode, METH_VARARGS, "encode(text, parse_special=True, before=(), after=()) -> [*before, *ids, *after]"},
    {"nfc", (PyCFunction)Core_nfc, METH_O | METH_STATIC, "nfc(text) -> text in Normalization Form C (Unicode 9.0)"},
    {"char_flags", (PyCFunction)Core_flags, METH_O | METH_STATIC, "char_flags(code point) -> property bits"},
    {NULL}};

static PyMemberDef Core_members[] = {
    {"last_work", T_ULONGLONG, offsetof(Core, last_work), READONLY, "bytes looked at, look-ups, merges and heap moves of the last encode"},
    {NULL}};

static PyType_Slot Core_slots[] = {
    {Py_tp_doc, "The compiled encoder of one tokenizer; see engine/tokenizer/core.py"},
    {Py_tp_init, Core_init},
    {Py_tp_dealloc, Core_dealloc},
    {Py_tp_methods, Core_methods},
    {Py_tp_members, Core_members},
    {0, NULL}};

static PyType_Spec Core_spec = {"engine.tokenizer._bpe.Core", sizeof(Core), 0, Py_TPFLAGS_DEFAULT, Core_slots};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "engine.tokenizer._bpe", NULL, -1, NULL};

PyMODINIT_FUNC PyInit__bpe(void) {
    PyObject *m = PyModule_Create(&module), *type = PyType_FromSpec(&Core_spec);
    if (m && type && !PyModule_AddObjectRef(m, "Core", type)) { Py_DECREF(type); return m; }
    Py_XDECREF(type);
    Py_XDECREF(m);
    return NULL;
}
