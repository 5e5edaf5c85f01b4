/* Added tokens: the longest one at a position. A walk is bounded by the longest token, which the loader bounds. */
#ifndef APPLIANCE_TRIE_H
#define APPLIANCE_TRIE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_merge.h"

enum { ADDED_SINGLE_WORD = 1, ADDED_LSTRIP = 2, ADDED_RSTRIP = 4, ADDED_SPECIAL = 8 };

/* A trie in one hash table: node << 8 | byte -> node; the root is 0. token[node]: id << 4 | flags, or -1.
 * `only`: the byte that all tokens start with, or 0 if there is no such byte. */
typedef struct { map64 edges; int64_t *token; uint8_t starts[256], only; size_t nodes; } trie;

static int trie_add(trie *t, const uint8_t *p, size_t n, uint32_t id, int flags) {
    uint64_t node = 0;
    t->starts[p[0]] = 1;
    for (size_t i = 0; i < n; i++) {
        uint64_t next = map64_get(&t->edges, node << 8 | p[i], 0);
        if (!next) {
            next = t->nodes++;
            t->token[next] = -1;
            map64_put(&t->edges, node << 8 | p[i], next);
        }
        node = next;
    }
    if (t->token[node] < 0) t->token[node] = (int64_t)id << 4 | flags; /* of equal contents the first counts */
    return 0;
}

/* `entries`: list of (content bytes, id, flags). */
static int trie_build(trie *t, PyObject *entries, uint64_t seed) {
    size_t total = 1;
    if (!PyList_Check(entries)) { PyErr_SetString(PyExc_TypeError, "added tokens must be a list"); return -1; }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entries); i++) {
        const char *p; Py_ssize_t n; int id, flags;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(entries, i), "y#ii", &p, &n, &id, &flags)) return -1;
        total += (size_t)n;
    }
    t->token = malloc(total * sizeof(int64_t));
    if (!t->token || map64_init(&t->edges, total, seed)) { PyErr_NoMemory(); return -1; }
    t->token[0] = -1;
    t->nodes = 1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entries); i++) {
        const char *p; Py_ssize_t n; int id, flags;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(entries, i), "y#ii", &p, &n, &id, &flags)) return -1;
        if (n) trie_add(t, (const uint8_t *)p, (size_t)n, (uint32_t)id, flags);
    }
    int kinds = 0;
    for (int b = 0; b < 256; b++)
        if (t->starts[b]) { kinds++; t->only = (uint8_t)b; }
    if (kinds != 1) t->only = 0;
    return 0;
}

/* The longest token at s[a..end-1]; its length or 0. */
static size_t trie_match(const trie *t, workspace *w, const uint8_t *s, size_t a, size_t end, int64_t *token) {
    uint64_t node = 0;
    size_t length = 0;
    for (size_t i = a; i < end; i++) {
        node = map64_get(&t->edges, node << 8 | s[i], 0);
        w->work++;
        if (!node) break;
        if (t->token[node] >= 0) { *token = t->token[node]; length = i + 1 - a; }
    }
    return length;
}

static size_t char_before(const uint8_t *s, size_t a) {
    do a--; while ((s[a] & 0xc0) == 0x80);
    return a;
}

static int stands_alone(const uint8_t *s, size_t first, size_t last, size_t end) {
    uint32_t n;
    if (first && flags_at(s + char_before(s, first), &n) & UC_W) return 0;
    return last == end || !(flags_at(s + last, &n) & UC_W);
}

#endif
