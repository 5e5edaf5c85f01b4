/* Growable arrays and two hash tables with linear probing: u64 -> u64, and bytes -> id. Both are seeded at random per
 * process, so that no vocabulary or text can be prepared to make their probe chains long. */
#ifndef APPLIANCE_MAP_H
#define APPLIANCE_MAP_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#define HUGE_PAGE ((size_t)2 << 20)

static inline int bit_at(const uint8_t *bits, uint32_t i) { return bits[i >> 3] >> (i & 7) & 1; }

static inline void set_bit(uint8_t *bits, uint32_t i, int value) {
    bits[i >> 3] = (uint8_t)((bits[i >> 3] & ~(1 << (i & 7))) | value << (i & 7));
}

/* A hint for large memory that is about to be filled: huge pages cost hundreds of times fewer page faults, and fewer
 * misses of the TLB afterwards. Only whole huge pages inside it are meant, so nothing is used that was not asked for. */
static void few_faults(void *data, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    uintptr_t first = ((uintptr_t)data + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1), last = ((uintptr_t)data + bytes) & ~(HUGE_PAGE - 1);
    if (last > first) (void)madvise((void *)first, last - first, MADV_HUGEPAGE); /* refused: slower, nothing else */
#endif
}

/* Memory for a table that is read at random, all bytes set to `fill`. */
static void *table_new(size_t bytes, int fill) {
    void *data = NULL;
    if (bytes < HUGE_PAGE) data = malloc(bytes);
    else if (posix_memalign(&data, HUGE_PAGE, bytes)) data = NULL;
    if (!data) return NULL;
    few_faults(data, bytes);
    return memset(data, fill, bytes);
}

typedef struct { uint64_t key, value; } map64_entry; /* key ~0 = free */
typedef struct { map64_entry *entries; uint64_t mask, seed; } map64;

static inline uint64_t mix64(uint64_t x) {
    x ^= x >> 32; x *= 0xd6e8feb86659fd93ull; x ^= x >> 32; x *= 0xd6e8feb86659fd93ull; return x ^ x >> 32;
}

static int map64_init(map64 *m, size_t entries, uint64_t seed) {
    uint64_t size = 16;
    while (size < 2 * (uint64_t)entries) size *= 2;
    m->entries = table_new(size * sizeof(map64_entry), 0xff);
    if (!m->entries) return -1;
    m->mask = size - 1; m->seed = seed;
    return 0;
}

static inline map64_entry *map64_slot(const map64 *m, uint64_t key) {
    uint64_t i = mix64(key ^ m->seed) & m->mask;
    while (m->entries[i].key != key && m->entries[i].key != ~0ull) i = (i + 1) & m->mask;
    return &m->entries[i];
}

/* The caller never stores more entries than it announced to map64_init. */
static inline void map64_put(map64 *m, uint64_t key, uint64_t value) {
    *map64_slot(m, key) = (map64_entry){key, value};
}

static inline uint64_t map64_get(const map64 *m, uint64_t key, uint64_t missing) {
    const map64_entry *entry = map64_slot(m, key);
    return entry->key == key ? entry->value : missing;
}

static void map64_free(map64 *m) { free(m->entries); m->entries = NULL; }

/* ---- bytes -> id -------------------------------------------------------------------------------------------------- */

static inline uint64_t load64(const uint8_t *p) { uint64_t x; memcpy(&x, p, 8); return x; }
static inline uint64_t load32(const uint8_t *p) { uint32_t x; memcpy(&x, p, 4); return x; }

static inline uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Reads only p[0..n-1]; multiply-and-fold as in wyhash. */
static inline uint64_t hash_bytes(const uint8_t *p, size_t n, uint64_t seed) {
    uint64_t a, b, h = seed ^ n * 0x9e3779b97f4a7c15ull;
    size_t left = n;
    while (left > 16) {
        h = fold(load64(p) ^ 0xa0761d6478bd642full, load64(p + 8) ^ h);
        p += 16; left -= 16;
    }
    if (left >= 8) { a = load64(p); b = load64(p + left - 8); }
    else if (left >= 4) { a = load32(p); b = load32(p + left - 4); }
    else if (left) { a = (uint64_t)p[0] << 16 | (uint64_t)p[left / 2] << 8 | p[left - 1]; b = 0; }
    else { a = b = 0; }
    return fold(fold(a ^ 0xe7037ed1a0b428dbull, b ^ h), 0x8ebc6af09c88c6e3ull ^ n);
}

/* n > 0. Overlapping loads instead of a call: keys are short. */
static inline int same_bytes(const uint8_t *a, const uint8_t *b, size_t n) {
    if (n >= 8) {
        for (size_t i = 0; i + 8 < n; i += 8)
            if (load64(a + i) != load64(b + i)) return 0;
        return load64(a + n - 8) == load64(b + n - 8);
    }
    if (n >= 4) return load32(a) == load32(b) && load32(a + n - 4) == load32(b + n - 4);
    return a[0] == b[0] && a[n / 2] == b[n / 2] && a[n - 1] == b[n - 1];
}

typedef struct {
    uint64_t *slots; /* high 32 bits of the hash << 32 | id + 1; 0 = free */
    uint64_t mask, seed;
    const uint8_t *blob; /* keys laid end to end; key of id: blob[offset[id]] .. blob[offset[id + 1] - 1] */
    const uint32_t *offset;
    uint32_t longest;
} word_table;

static int words_init(word_table *t, const uint8_t *blob, const uint32_t *offset, uint32_t count, uint64_t seed) {
    uint64_t size = 16;
    while (size < 2 * (uint64_t)count) size *= 2;
    t->slots = table_new(size * sizeof(uint64_t), 0);
    if (!t->slots) return -1;
    t->mask = size - 1; t->seed = seed; t->blob = blob; t->offset = offset; t->longest = 0;
    for (uint32_t id = 0; id < count; id++) {
        uint32_t n = offset[id + 1] - offset[id];
        if (!n) continue;
        if (n > t->longest) t->longest = n;
        uint64_t h = hash_bytes(blob + offset[id], n, seed), i = h & t->mask;
        while (t->slots[i]) i = (i + 1) & t->mask;
        t->slots[i] = (h & 0xffffffff00000000ull) | (id + 1);
    }
    return 0;
}

static inline int64_t words_find(const word_table *t, const uint8_t *p, size_t n, uint64_t h) {
    if (n > t->longest || !n) return -1;
    for (uint64_t i = h & t->mask; t->slots[i]; i = (i + 1) & t->mask) {
        if ((t->slots[i] ^ h) >> 32) continue;
        uint32_t id = (uint32_t)t->slots[i] - 1;
        if (t->offset[id + 1] - t->offset[id] == n && same_bytes(t->blob + t->offset[id], p, n)) return id;
    }
    return -1;
}

/* ---- growable buffers --------------------------------------------------------------------------------------------- */

typedef struct { uint8_t *data; size_t size, capacity; } byte_buffer;
typedef struct { uint32_t *data; size_t size, capacity; } id_buffer;

static int grow(void **data, size_t *capacity, size_t wanted, size_t item) {
    if (wanted <= *capacity) return 0;
    size_t next = *capacity + *capacity / 2 + 64;
    if (next < wanted) next = wanted;
    void *moved = realloc(*data, next * item);
    if (!moved) return -1;
    *data = moved; *capacity = next;
    return 0;
}

static inline int bytes_add(byte_buffer *b, const uint8_t *p, size_t n) {
    if (grow((void **)&b->data, &b->capacity, b->size + n, 1)) return -1;
    if (n) memcpy(b->data + b->size, p, n);
    b->size += n;
    return 0;
}

static inline int ids_add(id_buffer *b, uint32_t id) {
    if (b->size == b->capacity && grow((void **)&b->data, &b->capacity, b->size + 1, sizeof(uint32_t))) return -1;
    b->data[b->size++] = id;
    return 0;
}

#endif
