/* Pre-tokenizer rules as linear scanners over valid UTF-8 (no backtracking: no character is looked at more than a fixed
 * number of times). Each function says which regular expression it is. Property bits come from _unicode.h. */
#ifndef APPLIANCE_SCAN_H
#define APPLIANCE_SCAN_H

#include <stddef.h>
#include <string.h>
#include "_unicode.h"

enum { SPLIT_NONE, SPLIT_GPT2, SPLIT_LLAMA3, SPLIT_META, SPLIT_META_RUNS };
enum { UC_LNS = UC_L | UC_N | UC_S };

typedef struct { uint32_t code; uint32_t bytes; } utf8_char;

static inline utf8_char utf8_at(const uint8_t *p) {
    if (p[0] < 0x80) return (utf8_char){p[0], 1};
    if (p[0] < 0xe0) return (utf8_char){(p[0] & 0x1fu) << 6 | (p[1] & 0x3fu), 2};
    if (p[0] < 0xf0) return (utf8_char){(p[0] & 0xfu) << 12 | (p[1] & 0x3fu) << 6 | (p[2] & 0x3fu), 3};
    return (utf8_char){(p[0] & 7u) << 18 | (p[1] & 0x3fu) << 12 | (p[2] & 0x3fu) << 6 | (p[3] & 0x3fu), 4};
}

static inline size_t utf8_put(uint8_t *p, uint32_t c) {
    if (c < 0x80) { p[0] = (uint8_t)c; return 1; }
    if (c < 0x800) { p[0] = 0xc0 | c >> 6; p[1] = 0x80 | (c & 0x3f); return 2; }
    if (c < 0x10000) { p[0] = 0xe0 | c >> 12; p[1] = 0x80 | (c >> 6 & 0x3f); p[2] = 0x80 | (c & 0x3f); return 3; }
    p[0] = 0xf0 | c >> 18; p[1] = 0x80 | (c >> 12 & 0x3f); p[2] = 0x80 | (c >> 6 & 0x3f); p[3] = 0x80 | (c & 0x3f);
    return 4;
}

static inline uint8_t code_flags(uint32_t code) { return uc_stage2[uc_stage1[code >> 7] << 7 | (code & 127)]; }

static inline uint8_t flags_at(const uint8_t *p, uint32_t *bytes) {
    if (p[0] < 0x80) { *bytes = 1; return uc_stage2[p[0]]; } /* block 0 is ASCII: uc_stage1[0] is 0 */
    utf8_char c = utf8_at(p);
    *bytes = c.bytes;
    return code_flags(c.code);
}

/* End of the run of characters at `a` whose bits L|N|S are exactly `kind` (0: none of them), at most `limit` of them.
 * Here and below `work` counts the bytes that were looked at. */
static inline size_t class_run(const uint8_t *s, size_t a, size_t end, uint8_t kind, size_t limit,
                               uint64_t *work) {
    uint32_t n;
    size_t first = a;
    while (a < end && limit-- && (flags_at(s + a, &n) & UC_LNS) == kind) a += n;
    *work += a - first;
    return a;
}

/* \s+(?!\S)|\s+ from `a`, which is white space; `stop` is the end of the run. */
static inline size_t white_end(const uint8_t *s, size_t a, size_t stop, size_t end) {
    if (stop == end) return stop;
    size_t last = stop - 1;
    while ((s[last] & 0xc0) == 0x80) last--;
    return last > a ? last : stop;
}

/* The bytes after an apostrophe: length of 's|'t|'re|'ve|'m|'ll|'d or 0. `fold`: (?i:), where U+017F is also an s. */
static inline size_t contraction(const uint8_t *s, size_t a, size_t end, int fold) {
    if (end - a < 2) return 0;
    uint8_t x = s[a + 1], y = end - a > 2 ? s[a + 2] : 0;
    if (fold) {
        if (x == 0xc5 && y == 0xbf) return 3;
        if (x >= 'A' && x <= 'Z') x |= 0x20;
        if (y >= 'A' && y <= 'Z') y |= 0x20;
    }
    if (x == 's' || x == 't' || x == 'm' || x == 'd') return 2;
    return ((x == 'r' || x == 'v') && y == 'e') || (x == 'l' && y == 'l') ? 3 : 0;
}

/* 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static inline size_t scan_gpt2(const uint8_t *s, size_t a, size_t end, uint64_t *work) {
    size_t n;
    if (s[a] == '\'' && (n = contraction(s, a, end, 0))) return a + n;
    uint32_t bytes;
    size_t first = s[a] == ' ' && a + 1 < end ? a + 1 : a;
    uint8_t kind = flags_at(s + first, &bytes) & UC_LNS;
    if (kind != UC_S) return class_run(s, first + bytes, end, kind, SIZE_MAX, work);
    return white_end(s, a, class_run(s, first, end, UC_S, SIZE_MAX, work), end);
}

/* (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,max}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+ */
static inline size_t scan_llama3(const uint8_t *s, size_t a, size_t end, size_t max_numbers, uint64_t *work) {
    size_t n;
    uint32_t bytes, next;
    if (s[a] == '\'' && (n = contraction(s, a, end, 1))) return a + n;
    uint8_t kind = flags_at(s + a, &bytes) & UC_LNS;
    if (kind == UC_L) return class_run(s, a + bytes, end, UC_L, SIZE_MAX, work);
    if (kind == UC_N) return class_run(s, a, end, UC_N, max_numbers, work);
    size_t after = a + bytes;
    uint8_t then = after < end ? flags_at(s + after, &next) & UC_LNS : UC_LNS; /* UC_LNS: nothing there */
    if (then == UC_L && s[a] != '\r' && s[a] != '\n') return class_run(s, after + next, end, UC_L, SIZE_MAX, work);
    if (kind == 0 || (s[a] == ' ' && then == 0)) {
        size_t stop = class_run(s, after, end, 0, SIZE_MAX, work);
        while (stop < end && (s[stop] == '\r' || s[stop] == '\n')) { stop++; ++*work; }
        return stop;
    }
    size_t stop = class_run(s, a, end, UC_S, SIZE_MAX, work), newline = stop;
    while (newline > a && s[newline - 1] != '\r' && s[newline - 1] != '\n') newline--;
    *work += stop - newline;
    return newline > a ? newline : white_end(s, a, stop, end);
}

static inline int is_meta(const uint8_t *s, size_t a, size_t end) { /* U+2581 */
    return end - a >= 3 && s[a] == 0xe2 && s[a + 1] == 0x96 && s[a + 2] == 0x81;
}

static inline size_t find_meta(const uint8_t *s, size_t a, size_t end) {
    while (a < end) {
        const uint8_t *found = memchr(s + a, 0xe2, end - a);
        if (!found) return end;
        a = (size_t)(found - s);
        if (is_meta(s, a, end)) return a;
        a++;
    }
    return end;
}

static inline size_t scan_word(const uint8_t *s, size_t a, size_t end, int split, size_t max_numbers, uint64_t *work) {
    size_t stop;
    switch (split) {
    case SPLIT_GPT2: return scan_gpt2(s, a, end, work);
    case SPLIT_LLAMA3: return scan_llama3(s, a, end, max_numbers, work);
    case SPLIT_META: stop = find_meta(s, a + 1, end); break;
    case SPLIT_META_RUNS:
        stop = a;
        while (is_meta(s, stop, end)) stop += 3;
        stop = find_meta(s, stop, end);
        break;
    default: stop = end;
    }
    *work += stop - a;
    return stop;
}

/* The end of the stretch at `a` in which all neighbours may meet: bit (first byte << 8 | second byte) of `meet`. */
static inline size_t scan_meeting(const uint8_t *s, size_t a, size_t end, const uint8_t *meet, uint64_t *work) {
    size_t stop = a + 1;
    while (stop < end && meet[s[stop - 1] << 5 | s[stop] >> 3] >> (s[stop] & 7) & 1) stop++;
    *work += stop - a;
    return stop;
}

/* Digits: the end of the stretch at `a` that is either without numbers, or one number (or a run of them). */
static inline size_t digit_span(const uint8_t *s, size_t a, size_t end, int individual, uint64_t *work) {
    uint32_t n;
    size_t first = a;
    uint8_t kind = flags_at(s + a, &n) & UC_D;
    a += n;
    if (kind && individual) return a;
    for (;;) {
        while (!kind && a + 8 <= end) { /* eight ASCII characters that are not 0-9 */
            uint64_t x, t;
            memcpy(&x, s + a, 8);
            t = (x ^ 0x3030303030303030ull) + 0x7676767676767676ull; /* bit 7 of a byte: not a digit, if x < 0x80 */
            if ((x | ~t) & 0x8080808080808080ull) break;
            a += 8;
        }
        size_t stop = a + 8 < end ? a + 8 : end;
        while (a < stop && (flags_at(s + a, &n) & UC_D) == kind) a += n;
        if (a < stop || a >= end) break;
    }
    *work += a - first;
    return a;
}

#endif
