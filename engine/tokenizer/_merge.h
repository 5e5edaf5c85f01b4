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

typedef struct { uint8_t length, count, unused[2]; uint32_t ids[CACHE_IDS]; uint8_t key[CACHE_KEY]; } cache_entry;

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

typedef struct {
    cache_entry *cache;
    id_buffer ids; /* the result */
    uint32_t *symbol;
    uint64_t *value, *heap; /* value[i]: rank << 32 | merged of the pair that starts at symbol i */
    node *nodes;
    size_t capacity, node_capacity, heap_size, heap_capacity;
    byte_buffer piece, other; /* normalized text */
    id_buffer text, spare; /* scratch of NFC */
    size_t bytes; /* of all buffers, when it went into the pool */
    uint64_t work; /* look-ups, merges and heap moves so far: what the linearity test counts */
} workspace;

static inline uint64_t find_pair(const model *m, workspace *w, uint32_t left, uint32_t right) {
    w->work++;
    return map64_get(&m->pairs, (uint64_t)left << 32 | right, NO_PAIR);
}

static int reserve_symbols(workspace *w, size_t n) {
    if (n <= w->capacity) return 0;
    size_t next = n + n / 4 + 64, unused = w->capacity;
    if (grow((void **)&w->symbol, &unused, next, sizeof(uint32_t))) return -1;
    unused = w->capacity;
    if (grow((void **)&w->value, &unused, next, sizeof(uint64_t))) return -1;
    w->capacity = next;
    return 0;
}

/* Fills w->symbol for one pre-token; returns the number of symbols, or -1. Mirrors PureEncoder.symbols. Not byte level:
 * w->value says which symbols are ASCII characters (0x80: not one). */
static int64_t fill_symbols(const model *m, workspace *w, const uint8_t *p, size_t n) {
    if (n > INT32_MAX || reserve_symbols(w, n)) return -1; /* positions are 32 bits */
    size_t count = 0;
    if (m->byte_level) {
        for (size_t i = 0; i < n; i++)
            if (m->byte_ids[p[i]] >= 0) w->symbol[count++] = (uint32_t)m->byte_ids[p[i]];
        return (int64_t)count;
    }
    int pending = 0;
    for (size_t i = 0; i < n;) {
        if (p[i] < 0x80 && m->ascii_ids[p[i]] >= 0 && !pending) {
            w->value[count] = p[i]; /* for merge_part: this symbol is the ASCII character p[i] */
            w->symbol[count++] = (uint32_t)m->ascii_ids[p[i++]];
            continue;
        }
        uint32_t bytes = utf8_at(p + i).bytes;
        size_t first = count;
        int64_t known = words_find(&m->words, p + i, bytes, hash_bytes(p + i, bytes, m->words.seed));
        w->work++;
        int complete = m->byte_fallback;
        for (uint32_t k = 0; k < bytes; k++) complete &= m->byte_ids[p[i + k]] >= 0;
        if (known >= 0) {
            if (pending) w->symbol[count++] = (uint32_t)m->unk_id;
            pending = 0;
            w->symbol[count++] = (uint32_t)known;
        } else if (complete) {
            for (uint32_t k = 0; k < bytes; k++) w->symbol[count++] = (uint32_t)m->byte_ids[p[i + k]];
        } else if (m->unk_id >= 0) {
            if (pending && !m->fuse_unk) w->symbol[count++] = (uint32_t)m->unk_id;
            pending = 1;
        }
        while (first < count) w->value[first++] = 0x80;
        i += bytes;
    }
    if (pending) {
        w->value[count] = 0x80;
        w->symbol[count++] = (uint32_t)m->unk_id;
    }
    return (int64_t)count;
}

/* Few symbols: find the lowest (rank, position) by looking at all, merge, repeat. Returns what is left. */
static size_t merge_short(const model *m, workspace *w, size_t n) {
    uint32_t *symbol = w->symbol;
    uint64_t *value = w->value;
    while (n > 1) {
        uint64_t best = NO_PAIR;
        size_t at = 0;
        for (size_t i = 0; i + 1 < n; i++)
            if (value[i] < best) { best = value[i]; at = i; }
        w->work += n;
        if (best == NO_PAIR) break;
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

static int heap_push(workspace *w, uint64_t item) {
    if (grow((void **)&w->heap, &w->heap_capacity, w->heap_size + 1, sizeof(uint64_t))) return -1;
    size_t i = w->heap_size++;
    while (i && w->heap[(i - 1) / 4] > item) {
        w->heap[i] = w->heap[(i - 1) / 4];
        i = (i - 1) / 4;
        w->work++;
    }
    w->heap[i] = item;
    return 0;
}

static inline int link_pair(const model *m, workspace *w, node *nodes, uint32_t left, uint32_t right) {
    uint64_t value = find_pair(m, w, nodes[left].symbol, nodes[right].symbol);
    nodes[left].rank = (uint32_t)(value >> 32); /* NO_PAIR gives UINT32_MAX */
    nodes[left].merged = (uint32_t)value;
    return value == NO_PAIR ? 0 : heap_push(w, (value & 0xffffffff00000000ull) | left);
}

/* Many symbols: a 4-ary heap of rank << 32 | position over a doubly linked list; stale entries are recognised because
 * the node at that position no longer has their rank (a rank belongs to one pair). At most 3n pushes: O(n log n). */
static int64_t merge_long(const model *m, workspace *w, size_t n) {
    if (grow((void **)&w->heap, &w->heap_capacity, n, sizeof(uint64_t))) return -1;
    if (grow((void **)&w->nodes, &w->node_capacity, n, sizeof(node))) return -1;
    node *nodes = w->nodes;
    w->heap_size = 0;
    for (size_t i = 0; i < n; i++) { /* `before` of the first is UINT32_MAX, `after` of the last is n */
        uint64_t value = w->value[i];
        nodes[i] = (node){w->symbol[i], (uint32_t)i - 1, (uint32_t)i + 1, (uint32_t)(value >> 32), (uint32_t)value};
        if (value != NO_PAIR) w->heap[w->heap_size++] = (value & 0xffffffff00000000ull) | i;
    }
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
        other->symbol = UINT32_MAX; /* dead */
        if (here->after < n) {
            nodes[here->after].before = at;
            if (link_pair(m, w, nodes, at, here->after)) return -1;
        }
        if (here->before != UINT32_MAX && link_pair(m, w, nodes, here->before, at)) return -1;
    }
    size_t kept = 0;
    for (size_t i = 0; i < n; i++)
        if (nodes[i].symbol != UINT32_MAX) w->symbol[kept++] = nodes[i].symbol;
    return (int64_t)kept;
}

/* Appends the ids of p[0..n-1], across whose ends nothing can merge. */
static int merge_part(const model *m, workspace *w, const uint8_t *p, size_t n) {
    int64_t filled = fill_symbols(m, w, p, n);
    if (filled < 0) return -1;
    size_t count = (size_t)filled;
    if (!count) return 0;
    if (m->byte_level && count == n) { /* no byte was dropped: neighbours in p are neighbours in symbol */
        for (size_t i = 0; i + 1 < count; i++) w->value[i] = m->byte_pairs[(uint32_t)p[i] << 8 | p[i + 1]];
        w->work += count;
    } else if (!m->byte_level) {
        for (size_t i = 0; i + 1 < count; i++)
            w->value[i] = w->value[i] < 0x80 && w->value[i + 1] < 0x80
                              ? m->byte_pairs[w->value[i] << 8 | w->value[i + 1]]
                              : find_pair(m, w, w->symbol[i], w->symbol[i + 1]);
        w->work += count;
    } else {
        for (size_t i = 0; i + 1 < count; i++) w->value[i] = find_pair(m, w, w->symbol[i], w->symbol[i + 1]);
    }
    w->value[count - 1] = NO_PAIR;
    filled = count <= SHORT_WORD ? (int64_t)merge_short(m, w, count) : merge_long(m, w, count);
    for (int64_t i = 0; i < filled; i++)
        if (ids_add(&w->ids, w->symbol[i])) return -1;
    return filled < 0 ? -1 : 0;
}

/* Appends the ids of one pre-token, cut first where no token reaches across. */
static int merge_word(const model *m, workspace *w, const uint8_t *p, size_t n) {
    size_t start = 0;
    for (size_t i = 1; i < n; i++) {
        uint32_t pair = (uint32_t)p[i - 1] << 8 | p[i];
        if (m->inside[pair >> 3] >> (pair & 7) & 1) continue;
        if (merge_part(m, w, p + start, i - start)) return -1;
        start = i;
    }
    return merge_part(m, w, p + start, n - start);
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
            m->inside[pair >> 3] |= (uint8_t)(1 << (pair & 7));
        }
    for (uint32_t pair = 0; pair < 65536; pair++)
        if (m->byte_level ? m->byte_ids[pair >> 8] < 0 || m->byte_ids[pair & 255] < 0 : (pair & 0xc0) == 0x80)
            m->inside[pair >> 3] |= (uint8_t)(1 << (pair & 7)); /* dropped bytes; the middle of a character */
}

/* Appends the ids of one pre-token to w->ids. */
static int encode_word(const model *m, workspace *w, const uint8_t *p, size_t n) {
    uint64_t h = hash_bytes(p, n, m->words.seed);
    cache_entry *entry = n <= CACHE_KEY ? &w->cache[h >> (64 - CACHE_BITS)] : NULL;
    w->work++;
    if (entry && entry->length == n && same_bytes(entry->key, p, n)) {
        for (int i = 0; i < entry->count; i++)
            if (ids_add(&w->ids, entry->ids[i])) return -1;
        return 0;
    }
    size_t start = w->ids.size;
    int64_t whole = words_find(&m->words, p, n, h);
    if (whole >= 0 && (m->ignore_merges || m->whole[whole])) {
        if (ids_add(&w->ids, (uint32_t)whole)) return -1;
    } else {
        if (merge_word(m, w, p, n)) return -1;
    }
    size_t made = w->ids.size - start;
    if (entry && made <= CACHE_IDS) {
        entry->length = (uint8_t)n; entry->count = (uint8_t)made;
        memcpy(entry->key, p, n);
        memcpy(entry->ids, w->ids.data + start, made * sizeof(uint32_t));
    }
    return 0;
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
