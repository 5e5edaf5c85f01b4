/* Byte pair merges of one pre-token: whole-word look-ups, a bounded cache, a scan for short words, a heap for long ones. */
#ifndef APPLIANCE_MERGE_H
#define APPLIANCE_MERGE_H

#include "_map.h"
#include "_scan.h"

#define NO_PAIR UINT64_MAX
#define CACHE_BITS 15 /* 32768 entries of 64 bytes, 2 MiB; one cache per workspace */
#define CACHE_KEY 36
#define CACHE_IDS 6
#define SHORT_WORD 48 /* symbols up to which scanning all pairs for the best beats a heap */
#define WINDOW 2048 /* symbols of a long word that are merged at a time: about 100 KB of nodes and heap */
#define NO_ORIGIN 0x80 /* not byte level: a symbol that is not an ASCII character */

typedef struct { uint8_t tag, count, unused[2]; uint32_t ids[CACHE_IDS]; uint8_t key[CACHE_KEY]; } cache_entry;

/* All that decides ids; never changes after construction, so any number of threads may read it. */
typedef struct {
    word_table words;
    map64 pairs; /* left << 32 | right -> rank << 32 | merged */
    uint64_t *byte_pairs; /* the same for the symbols of two bytes (not byte level: of two ASCII characters), by index
                             left byte << 8 | right byte: the first look-ups of every word, without hashing */
    int32_t ascii_ids[128]; /* not byte level: the token of one ASCII character, or -1 */
    uint8_t inside[8192]; /* bit a << 8 | b: the bytes a, b may meet inside a token; else nothing merges across them */
    uint8_t *whole; /* per id: 1 if a pre-token equal to this token's bytes is encoded as exactly this token */
    int32_t byte_ids[256];
    int byte_level, byte_fallback, fuse_unk, ignore_merges;
    int32_t unk_id;
    uint32_t count;
} model;

/* One symbol of a long word, all that a merge touches in one place. `rank` UINT32_MAX: no pair starts here. */
typedef struct { uint32_t symbol, before, after, rank, merged; } node;

/* A stretch of symbols after its merges: token k is made of the symbols start[k] .. start[k + 1] - 1. */
typedef struct { uint32_t *id, *start; size_t count, capacity; } tokens;

typedef struct {
    cache_entry *cache;
    id_buffer ids; /* the result */
    uint32_t *symbol; /* of the word that is merged, as far as it is needed now */
    uint8_t *origin; /* per symbol its byte; not byte level: its ASCII character or NO_ORIGIN */
    size_t count, capacity; /* of these two */
    node *nodes;
    uint64_t *heap;
    size_t node_capacity, heap_size, heap_capacity;
    tokens now, next, pair;
    byte_buffer piece, other; /* normalized text */
    id_buffer text, spare; /* scratch of NFC */
    size_t bytes; /* of all buffers, when it went into the pool */
    uint64_t work; /* bytes and symbols looked at, look-ups, merges and heap moves: what the linearity test counts */
} workspace;

static inline uint64_t find_pair(const model *m, workspace *w, uint32_t left, uint32_t right) {
    w->work++;
    return map64_get(&m->pairs, (uint64_t)left << 32 | right, NO_PAIR);
}

/* ---- symbols ------------------------------------------------------------------------------------------------------ */

/* The bytes of one pre-token that are not symbols yet. `pending`: an unknown token that later characters may join. */
typedef struct { const uint8_t *p; size_t n, at; int pending; } source;

static inline void add_symbol(workspace *w, int32_t symbol, uint8_t origin) {
    w->origin[w->count] = origin;
    w->symbol[w->count++] = (uint32_t)symbol;
}

static void fill_bytes(const model *m, workspace *w, source *f, size_t want) {
    while (w->count < want && f->at < f->n) {
        uint8_t byte = f->p[f->at++];
        if (m->byte_ids[byte] >= 0) add_symbol(w, m->byte_ids[byte], byte); /* else it vanishes */
    }
}

static void fill_char(const model *m, workspace *w, source *f) {
    const uint8_t *p = f->p + f->at;
    uint32_t bytes = utf8_at(p).bytes;
    int64_t known = words_find(&m->words, p, bytes, hash_bytes(p, bytes, m->words.seed));
    int complete = m->byte_fallback;
    for (uint32_t k = 0; k < bytes; k++) complete &= m->byte_ids[p[k]] >= 0;
    f->at += bytes;
    w->work++;
    if (known >= 0) {
        if (f->pending) add_symbol(w, m->unk_id, NO_ORIGIN);
        f->pending = 0;
        add_symbol(w, (int32_t)known, bytes == 1 ? *p : NO_ORIGIN);
    } else if (complete) {
        for (uint32_t k = 0; k < bytes; k++) add_symbol(w, m->byte_ids[p[k]], NO_ORIGIN);
    } else if (m->unk_id >= 0) {
        if (f->pending && !m->fuse_unk) add_symbol(w, m->unk_id, NO_ORIGIN);
        f->pending = 1;
    }
}

/* Appends symbols until there are `want` (or a few more), or the pre-token ends. Mirrors PureEncoder.symbols. */
static int fill_symbols(const model *m, workspace *w, source *f, size_t want) {
    if (want + 8 > w->capacity) {
        size_t next = want + want / 4 + 64, unused = w->capacity;
        if (grow((void **)&w->symbol, &unused, next, sizeof(uint32_t))) return -1;
        unused = w->capacity;
        if (grow((void **)&w->origin, &unused, next, 1)) return -1;
        w->capacity = next;
    }
    size_t before = w->count;
    if (m->byte_level) fill_bytes(m, w, f, want);
    while (w->count < want && f->at < f->n) {
        uint8_t byte = f->p[f->at];
        if (byte >= 0x80 || m->ascii_ids[byte] < 0 || f->pending) { fill_char(m, w, f); continue; }
        add_symbol(w, m->ascii_ids[byte], byte);
        f->at++;
    }
    if (f->at == f->n && f->pending) {
        add_symbol(w, m->unk_id, NO_ORIGIN);
        f->pending = 0;
    }
    w->work += w->count - before;
    return 0;
}

/* The pair of two neighbouring symbols, before any merge. */
static inline uint64_t first_pair(const model *m, workspace *w, const uint32_t *symbol, const uint8_t *origin) {
    if (m->byte_level || (origin[0] | origin[1]) < 0x80) return m->byte_pairs[(uint32_t)origin[0] << 8 | origin[1]];
    return find_pair(m, w, symbol[0], symbol[1]);
}

/* ---- merges ------------------------------------------------------------------------------------------------------- */

/* At most SHORT_WORD symbols, in place: find the lowest (rank, position) by looking at all, merge, repeat. Returns what
 * is left; or 0 as soon as something merges across the left edge of symbol `border`, if that is not 0. */
static size_t merge_short(const model *m, workspace *w, uint32_t *symbol, const uint8_t *origin, size_t n, size_t border) {
    uint64_t value[SHORT_WORD + 1]; /* value[i]: rank << 32 | merged of the pair that starts at symbol i */
    for (size_t i = 0; i + 1 < n; i++) value[i] = first_pair(m, w, symbol + i, origin + i);
    value[n - 1] = NO_PAIR;
    w->work += n;
    while (n > 1) {
        uint64_t best = NO_PAIR;
        size_t at = 0;
        for (size_t i = 0; i + 1 < n; i++)
            if (value[i] < best) { best = value[i]; at = i; }
        w->work += n;
        if (best == NO_PAIR) break;
        if (at + 1 == border) return 0;
        if (at + 1 < border) border--;
        symbol[at] = (uint32_t)best;
        n--;
        memmove(symbol + at + 1, symbol + at + 2, (n - at - 1) * sizeof(uint32_t));
        memmove(value + at, value + at + 1, (n - at) * sizeof(uint64_t));
        if (at + 1 < n) value[at] = find_pair(m, w, symbol[at], symbol[at + 1]);
        if (at) value[at - 1] = find_pair(m, w, symbol[at - 1], symbol[at]);
    }
    return n;
}

static void heap_down(workspace *w, size_t i, uint64_t item) {
    uint64_t *heap = w->heap;
    for (;;) {
        size_t child = 4 * i + 1, last = child + 4, best = child;
        if (child >= w->heap_size) break;
        if (last > w->heap_size) last = w->heap_size;
        for (size_t k = child + 1; k < last; k++)
            if (heap[k] < heap[best]) best = k;
        w->work++;
        if (heap[best] >= item) break;
        heap[i] = heap[best];
        i = best;
    }
    heap[i] = item;
}

static inline void heap_push(workspace *w, uint64_t item) {
    size_t i = w->heap_size++;
    while (i && w->heap[(i - 1) / 4] > item) {
        w->heap[i] = w->heap[(i - 1) / 4];
        i = (i - 1) / 4;
        w->work++;
    }
    w->heap[i] = item;
}

static inline void link_pair(const model *m, workspace *w, node *nodes, uint32_t left, uint32_t right) {
    uint64_t value = find_pair(m, w, nodes[left].symbol, nodes[right].symbol);
    nodes[left].rank = (uint32_t)(value >> 32); /* NO_PAIR gives UINT32_MAX */
    nodes[left].merged = (uint32_t)value;
    if (value != NO_PAIR) heap_push(w, (value & 0xffffffff00000000ull) | left);
}

/* Many symbols: a 4-ary heap of rank << 32 | position over a doubly linked list; stale entries are recognised because
 * the node at that position no longer has their rank (a rank belongs to one pair). A merge takes one entry out and puts
 * at most two in, so the heap never holds more than 2n. O(n log n). */
static int merge_heap(const model *m, workspace *w, const uint32_t *symbol, const uint8_t *origin, size_t n, tokens *out) {
    size_t unused = out->capacity;
    if (grow((void **)&w->heap, &w->heap_capacity, 2 * n, sizeof(uint64_t)) ||
        grow((void **)&w->nodes, &w->node_capacity, n, sizeof(node)) ||
        grow((void **)&out->id, &unused, n + 1, sizeof(uint32_t)) ||
        grow((void **)&out->start, &out->capacity, n + 1, sizeof(uint32_t))) return -1;
    node *nodes = w->nodes;
    w->heap_size = 0;
    for (size_t i = 0; i < n; i++) { /* `before` of the first is UINT32_MAX, `after` of the last is n */
        uint64_t value = i + 1 < n ? first_pair(m, w, symbol + i, origin + i) : NO_PAIR;
        nodes[i] = (node){symbol[i], (uint32_t)i - 1, (uint32_t)i + 1, (uint32_t)(value >> 32), (uint32_t)value};
        if (value != NO_PAIR) w->heap[w->heap_size++] = (value & 0xffffffff00000000ull) | i;
    }
    w->work += n;
    for (size_t i = w->heap_size / 4 + 1; i-- > 0;)
        if (i < w->heap_size) heap_down(w, i, w->heap[i]);
    while (w->heap_size) {
        uint64_t top = w->heap[0], moved = w->heap[--w->heap_size];
        if (w->heap_size) heap_down(w, 0, moved);
        uint32_t at = (uint32_t)top;
        node *here = &nodes[at];
        if (here->rank != top >> 32) continue;
        node *other = &nodes[here->after];
        here->symbol = here->merged;
        here->after = other->after;
        here->rank = other->rank = UINT32_MAX;
        if (here->after < n) {
            nodes[here->after].before = at;
            link_pair(m, w, nodes, at, here->after);
        }
        if (here->before != UINT32_MAX) link_pair(m, w, nodes, here->before, at);
    }
    out->count = 0;
    for (uint32_t i = 0; i < n; i = nodes[i].after) {
        out->id[out->count] = nodes[i].symbol;
        out->start[out->count++] = i;
    }
    out->start[out->count] = (uint32_t)n;
    return 0;
}

/* 1 if w->symbol[first..last-1] merges to two tokens that meet at `border`, 0 if something merges across it. */
static int pair_holds(const model *m, workspace *w, size_t first, size_t border, size_t last) {
    if (last - first > SHORT_WORD) {
        if (merge_heap(m, w, w->symbol + first, w->origin + first, last - first, &w->pair)) return -1;
        return w->pair.count == 2 && w->pair.start[1] == border - first;
    }
    uint32_t copy[SHORT_WORD];
    memcpy(copy, w->symbol + first, (last - first) * sizeof(uint32_t));
    return merge_short(m, w, copy, w->origin + first, last - first, border - first) == 2;
}

static int emit(workspace *w, const uint32_t *id, size_t n) {
    if (grow((void **)&w->ids.data, &w->ids.capacity, w->ids.size + n + CACHE_IDS, sizeof(uint32_t))) return -1;
    memcpy(w->ids.data + w->ids.size, id, n * sizeof(uint32_t));
    w->ids.size += n;
    return 0;
}

/* More than WINDOW symbols: window after window, so that what is worked on stays in the nearest caches whatever the
 * length, and memory does not grow with it. Each window starts where one of the last tokens of the window before it
 * started (what is right of there may come out differently once more text is seen). It is exact because of this:
 *
 *   If x merges to X, y to Y, and [last of X, first of Y] merges to just these two, then xy merges to X followed by Y.
 *
 * For suppose not, and look at the first merge across the border in xy. Until then x and y have been merged as each
 * would be alone, and inside them nothing has reached across the left end of (last of X) or the right end of (first of
 * Y), since those are borders in X and Y. So these two, alone, would have gone through the same merges in the same
 * order (lowest rank first, then leftmost: leaving out pairs elsewhere changes neither), up to this one: they would not
 * have stayed two. By the same argument any stretch of whole tokens of a result merges, alone, to just these tokens.
 *
 * Where the two do not hold, a window starts farther left; where that is more than half of it, windows get longer: at
 * worst one window is all there is. Hence O(n) for the windows, and O(n log n) only if they must grow with n. */
static int merge_long(const model *m, workspace *w, source *f) {
    tokens *now = &w->now, *next = &w->next;
    size_t window = WINDOW, hold = 2;
    if (merge_heap(m, w, w->symbol, w->origin, w->count, now)) return -1;
    for (;;) { /* `now` is what w->symbol[0 .. now end - 1] merges to; all before it has been emitted */
        size_t end = now->start[now->count];
        if (f->at == f->n && end == w->count) return emit(w, now->id, now->count);
        int holds = 0;
        size_t keep = now->count - hold, border = 0;
        if (2 * hold <= now->count) {
            border = now->start[keep];
            if (fill_symbols(m, w, f, border + window)) return -1;
            size_t n = w->count - border < window ? w->count - border : window;
            if (merge_heap(m, w, w->symbol + border, w->origin + border, n, next)) return -1;
            holds = pair_holds(m, w, now->start[keep - 1], border, border + next->start[1]);
            if (holds < 0) return -1;
        }
        if (holds) {
            if (emit(w, now->id, keep)) return -1;
            w->count -= border;
            memmove(w->symbol, w->symbol + border, w->count * sizeof(uint32_t));
            memmove(w->origin, w->origin + border, w->count);
            tokens *old = now; now = next; next = old;
            if (hold > 2) hold /= 2;
        } else if (2 * hold <= now->count) {
            hold *= 4;
        } else {
            window *= 2;
            hold = 2;
            if (fill_symbols(m, w, f, window)) return -1;
            size_t n = w->count < window ? w->count : window;
            if (merge_heap(m, w, w->symbol, w->origin, n, now)) return -1;
        }
    }
}

/* Appends the ids of p[0..n-1], across whose ends nothing can merge. */
static int merge_part(const model *m, workspace *w, const uint8_t *p, size_t n) {
    source f = {p, n, 0, 0};
    w->count = 0;
    if (fill_symbols(m, w, &f, WINDOW)) return -1;
    if (!w->count) return 0;
    if (w->count > SHORT_WORD) return merge_long(m, w, &f);
    return emit(w, w->symbol, merge_short(m, w, w->symbol, w->origin, w->count, 0));
}

/* Fills `inside` from the tokens that merges make. Where symbols are not the bytes of the text one by one (dropped
 * bytes, unknown tokens, a byte token that takes part in merges) every pair is marked: no cut. */
static void mark_inside(model *m, const uint32_t *left, const uint32_t *right, const uint32_t *merged, size_t count) {
    int cut = 1;
    for (int b = 0; b < 256; b++) cut &= m->byte_level || m->byte_ids[b] >= 0;
    for (size_t i = 0; i < count && cut && !m->byte_level; i++)
        for (int b = 0; b < 256; b++)
            cut &= (uint32_t)m->byte_ids[b] != left[i] && (uint32_t)m->byte_ids[b] != right[i];
    memset(m->inside, cut ? 0 : 0xff, sizeof(m->inside));
    for (size_t i = 0; i < count; i++)
        for (uint32_t k = m->words.offset[merged[i]]; k + 1 < m->words.offset[merged[i] + 1]; k++) {
            uint32_t pair = (uint32_t)m->words.blob[k] << 8 | m->words.blob[k + 1];
            set_bit(m->inside, pair, 1);
        }
    for (uint32_t pair = 0; pair < 65536; pair++)
        if (m->byte_level ? m->byte_ids[pair >> 8] < 0 || m->byte_ids[pair & 255] < 0 : (pair & 0xc0) == 0x80)
            set_bit(m->inside, pair, 1); /* dropped bytes; the middle of a character */
}

/* ---- words -------------------------------------------------------------------------------------------------------- */

/* Words and parts of words repeat, so their ids are remembered. They are a function of the key (where spaces stand for
 * U+2581 a key may hold either, which comes to the same) but for one thing: `ignore_merges` makes a whole word one token,
 * never a part of one. `tag` is the length of a word, or part_tag of a part. */
static inline uint8_t part_tag(const model *m, size_t n) { return (uint8_t)(n | (m->ignore_merges ? 0x80 : 0)); }

static inline cache_entry *cache_slot(workspace *w, uint64_t h) { return &w->cache[h >> (64 - CACHE_BITS)]; }

/* Appends the remembered ids of p[0..n-1] (n <= CACHE_KEY): 1, 0 if there are none, -1 without memory. */
static inline int cache_get(workspace *w, const cache_entry *entry, const uint8_t *p, size_t n, uint8_t tag) {
    if (entry->tag != tag || !same_bytes(entry->key, p, n)) return 0;
    if (w->ids.size + CACHE_IDS > w->ids.capacity &&
        grow((void **)&w->ids.data, &w->ids.capacity, w->ids.size + CACHE_IDS, sizeof(uint32_t))) return -1;
    memcpy(w->ids.data + w->ids.size, entry->ids, sizeof(entry->ids)); /* all six: the size of a copy is then known */
    w->ids.size += entry->count;
    return 1;
}

static inline void cache_put(workspace *w, cache_entry *entry, const uint8_t *p, size_t n, uint8_t tag, size_t start) {
    size_t made = w->ids.size - start;
    if (made > CACHE_IDS) return;
    entry->tag = tag; entry->count = (uint8_t)made;
    memcpy(entry->key, p, n);
    memcpy(entry->ids, w->ids.data + start, made * sizeof(uint32_t));
}

/* A part of a pre-token: across its ends nothing can merge. */
static int encode_part(const model *m, workspace *w, const uint8_t *p, size_t n) {
    if (n < 2 || n > CACHE_KEY) return merge_part(m, w, p, n);
    cache_entry *entry = cache_slot(w, hash_bytes(p, n, m->words.seed));
    int found = cache_get(w, entry, p, n, part_tag(m, n));
    w->work++;
    if (found) return found < 0 ? -1 : 0;
    size_t start = w->ids.size;
    if (merge_part(m, w, p, n)) return -1;
    cache_put(w, entry, p, n, part_tag(m, n), start);
    return 0;
}

/* Appends the ids of one pre-token, cut first where no token reaches across. */
static int merge_word(const model *m, workspace *w, const uint8_t *p, size_t n) {
    size_t start = 0;
    w->work += n;
    for (size_t i = 1; i < n; i++) {
        uint32_t pair = (uint32_t)p[i - 1] << 8 | p[i];
        if (bit_at(m->inside, pair)) continue;
        if (encode_part(m, w, p + start, i - start)) return -1;
        start = i;
    }
    return start ? encode_part(m, w, p + start, n - start) : merge_part(m, w, p, n);
}

/* Appends the ids of one pre-token, which is not remembered. */
static int encode_new(const model *m, workspace *w, const uint8_t *p, size_t n, uint64_t h) {
    int64_t whole = words_find(&m->words, p, n, h);
    if (whole >= 0 && (m->ignore_merges || m->whole[whole])) return ids_add(&w->ids, (uint32_t)whole);
    return merge_word(m, w, p, n);
}

/* Sets `whole`: for which tokens the merges lead back to the token itself. */
static int mark_whole(model *m, workspace *w) {
    for (uint32_t id = 0; id < m->count; id++) {
        const uint8_t *key = m->words.blob + m->words.offset[id];
        size_t n = m->words.offset[id + 1] - m->words.offset[id];
        if (!n) continue;
        w->ids.size = 0;
        if (merge_word(m, w, key, n)) return -1;
        m->whole[id] = w->ids.size == 1 && w->ids.data[0] == id;
    }
    return 0;
}

#endif
