/* Normalization Form C (Unicode Standard Annex #15), linear in time: marks are put in canonical order by counting. */
#ifndef APPLIANCE_NFC_H
#define APPLIANCE_NFC_H

#include "_map.h"
#include "_scan.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static uint32_t find_ccc(uint32_t code) {
    size_t low = 0, high = COUNT(uc_ccc);
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (uc_ccc[middle] >> 8 < code) low = middle + 1; else high = middle;
    }
    return low < COUNT(uc_ccc) && uc_ccc[low] >> 8 == code ? uc_ccc[low] & 0xff : 0;
}

static inline uint32_t ccc_of(uint32_t code) { return code_flags(code) & UC_C ? find_ccc(code) : 0; }

/* 1 if the text is NFC for certain (every NFC_Quick_Check is Yes and all marks are in order). */
static int nfc_quick_check(const uint8_t *s, size_t n) {
    uint32_t last = 0;
    for (size_t i = 0; i < n;) {
        if (s[i] < 0x80) { last = 0; i++; continue; }
        utf8_char c = utf8_at(s + i);
        uint8_t flags = code_flags(c.code);
        if (flags & UC_Q) return 0;
        uint32_t ccc = flags & UC_C ? find_ccc(c.code) : 0;
        if (ccc && ccc < last) return 0;
        last = ccc;
        i += c.bytes;
    }
    return 1;
}

static int nfc_decompose(id_buffer *out, uint32_t code) {
    if (code - 0xac00u < 11172u) { /* Hangul syllable */
        uint32_t index = code - 0xac00u;
        if (ids_add(out, 0x1100 + index / 588) || ids_add(out, 0x1161 + index % 588 / 28)) return -1;
        return index % 28 ? ids_add(out, 0x11a7 + index % 28) : 0;
    }
    size_t low = 0, high = COUNT(uc_decomposed);
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (uc_decomposed[middle] >> 32 < code) low = middle + 1; else high = middle;
    }
    if (low == COUNT(uc_decomposed) || uc_decomposed[low] >> 32 != code) return ids_add(out, code);
    uint32_t at = (uint32_t)uc_decomposed[low] >> 8, count = uc_decomposed[low] & 0xff;
    for (uint32_t i = 0; i < count; i++)
        if (ids_add(out, uc_decomposition[at + i])) return -1;
    return 0;
}

static uint32_t nfc_compose(uint32_t first, uint32_t second) {
    if (first - 0x1100u < 19 && second - 0x1161u < 21) return 0xac00 + (first - 0x1100) * 588 + (second - 0x1161) * 28;
    if (first - 0xac00u < 11172u && (first - 0xac00) % 28 == 0 && second - 0x11a8u < 27) return first + second - 0x11a7;
    uint64_t key = (uint64_t)first << 21 | second;
    size_t low = 0, high = COUNT(uc_pairs);
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (uc_pairs[middle] < key) low = middle + 1; else high = middle;
    }
    return low < COUNT(uc_pairs) && uc_pairs[low] == key ? uc_composites[low] : 0;
}

/* Stable counting sort by combining class of text[a..b-1], using `spare` for a copy. */
static int nfc_sort(uint32_t *text, size_t a, size_t b, id_buffer *spare) {
    if (b - a < 2) return 0;
    if (b - a <= 16) {
        for (size_t i = a + 1; i < b; i++)
            for (size_t j = i; j > a && ccc_of(text[j - 1]) > ccc_of(text[j]); j--) {
                uint32_t t = text[j]; text[j] = text[j - 1]; text[j - 1] = t;
            }
        return 0;
    }
    size_t start[257] = {0};
    spare->size = 0;
    if (grow((void **)&spare->data, &spare->capacity, b - a, sizeof(uint32_t))) return -1;
    memcpy(spare->data, text + a, (b - a) * sizeof(uint32_t));
    for (size_t i = a; i < b; i++) start[ccc_of(text[i]) + 1]++;
    for (int k = 0; k < 256; k++) start[k + 1] += start[k];
    for (size_t i = 0; i < b - a; i++) text[a + start[ccc_of(spare->data[i])]++] = spare->data[i];
    return 0;
}

/* Appends NFC of s[0..n-1] to `out`; `text` and `spare` are scratch. */
static int nfc_append(byte_buffer *out, const uint8_t *s, size_t n, id_buffer *text, id_buffer *spare) {
    text->size = 0;
    for (size_t i = 0; i < n;) {
        utf8_char c = utf8_at(s + i);
        if (c.code < 0xc0 ? ids_add(text, c.code) : nfc_decompose(text, c.code)) return -1;
        i += c.bytes;
    }
    size_t run = 0;
    for (size_t i = 0; i <= text->size; i++)
        if (i == text->size || !ccc_of(text->data[i])) {
            if (nfc_sort(text->data, run, i, spare)) return -1;
            run = i + 1;
        }
    size_t kept = 0, starter = SIZE_MAX;
    uint32_t last = 0;
    for (size_t i = 0; i < text->size; i++) {
        uint32_t code = text->data[i], ccc = ccc_of(code), pair;
        if (starter != SIZE_MAX && (starter + 1 == kept || last < ccc) && (pair = nfc_compose(text->data[starter], code))) {
            text->data[starter] = pair;
            continue;
        }
        if (!ccc) starter = kept;
        last = ccc;
        text->data[kept++] = code;
    }
    uint8_t utf8[4];
    for (size_t i = 0; i < kept; i++)
        if (bytes_add(out, utf8, utf8_put(utf8, text->data[i]))) return -1;
    return 0;
}

#endif
