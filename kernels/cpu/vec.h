/* Eight fp32 lanes: the unit in which every sum of the CPU backend is taken. Included once per instruction set, with
 * FN(name) giving the symbol a suffix and USE_AVX2 choosing intrinsics; the other version is plain C.
 *
 * The canonical order. A sum over k of n terms: lane l takes k = l, l+8, l+16 ... ascending with one fused multiply-add
 * each, starting from +0; lanes past the end add nothing; then ((l0+l1)+(l2+l3)) + ((l4+l5)+(l6+l7)). Nothing else (how
 * many rows, which tile, which thread) enters, and fma, +, *, / and sqrt are correctly rounded in IEEE 754, so both versions
 * give the same bits on every machine (NaN payloads excepted). */

typedef float FN(v8) __attribute__((vector_size(32)));
typedef int32_t FN(i8) __attribute__((vector_size(32)));
#define v8 FN(v8)
#define i8 FN(i8)
#define INLINE static inline __attribute__((always_inline))

INLINE v8 FN(load)(const float *p) {
    v8 r;
    memcpy(&r, p, sizeof r);
    return r;
}

INLINE void FN(store)(float *p, v8 a) { memcpy(p, &a, sizeof a); }

INLINE v8 FN(splat)(float x) { return (v8){x, x, x, x, x, x, x, x}; }

#ifdef USE_AVX2
INLINE v8 FN(fma)(v8 a, v8 b, v8 c) { return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

/* n in 1..7 lanes, zeros behind; never reads past p + n. */
INLINE v8 FN(load_part)(const float *p, int64_t n) {
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return (v8)_mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lane));
}

INLINE v8 FN(load_bf16)(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return (v8)_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

/* Sums of neighbouring lanes, as vhaddps but in three operations instead of four. */
INLINE __m256 FN(pairs)(__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
}

/* The sums of four vectors at once. */
INLINE void FN(hsum4)(v8 a, v8 b, v8 c, v8 d, float *y, int64_t stride) {
    __m256 abcd = FN(pairs)(FN(pairs)((__m256)a, (__m256)b), FN(pairs)((__m256)c, (__m256)d));
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
    if (stride == 1) {
        _mm_storeu_ps(y, sum);
    } else {
        y[0] = sum[0], y[stride] = sum[1], y[2 * stride] = sum[2], y[3 * stride] = sum[3];
    }
}
#else
INLINE v8 FN(fma)(v8 a, v8 b, v8 c) {
    v8 r;
    for (int l = 0; l < 8; l++) r[l] = __builtin_fmaf(a[l], b[l], c[l]);
    return r;
}

INLINE v8 FN(load_part)(const float *p, int64_t n) {
    v8 r = {0};
    for (int64_t l = 0; l < n; l++) r[l] = p[l];
    return r;
}

INLINE v8 FN(load_bf16)(const uint16_t *p) {
    i8 bits;
    for (int l = 0; l < 8; l++) bits[l] = (int32_t)((uint32_t)p[l] << 16);
    return (v8)bits;
}
#endif

INLINE float FN(hsum)(v8 a) { return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7])); }

#ifndef USE_AVX2
INLINE void FN(hsum4)(v8 a, v8 b, v8 c, v8 d, float *y, int64_t stride) {
    y[0] = FN(hsum)(a), y[stride] = FN(hsum)(b), y[2 * stride] = FN(hsum)(c), y[3 * stride] = FN(hsum)(d);
}
#endif

INLINE void FN(store_part)(float *p, v8 a, int64_t n) {
    for (int64_t l = 0; l < n; l++) p[l] = a[l];
}

INLINE v8 FN(load_bf16_part)(const uint16_t *p, int64_t n) {
    uint16_t lanes[8] = {0};
    for (int64_t l = 0; l < n; l++) lanes[l] = p[l];
    return FN(load_bf16)(lanes);
}

/* mask ? a : b, lanes of mask all ones or all zeros */
INLINE v8 FN(select)(i8 mask, v8 a, v8 b) { return (v8)((mask & (i8)a) | (~mask & (i8)b)); }

/* exp(x). n = round(x / ln 2), r = x - n ln 2 in two steps (Cody and Waite), then the Taylor polynomial of degree 7 of
 * exp(r), |r| <= 0.3466 (truncation below 6e-9), times 2^n in two factors so that subnormal results come out right.
 * Error below 1 ulp (0.93 at most in a sweep of every 13th float; where the result is subnormal, 0.83 of 2^-149);
 * exp(-inf) = 0, exp(inf) = inf, exp(NaN) = NaN, exp(0) = 1 exactly. */
INLINE v8 FN(exp)(v8 x) {
    const v8 magic = FN(splat)(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    v8 c = FN(select)(x > 89.0f, FN(splat)(89.0f), x);
    c = FN(select)(c < -105.0f, FN(splat)(-105.0f), c);
    v8 t = FN(fma)(c, FN(splat)(1.44269504088896341f), magic);
    v8 n = t - magic;
    v8 r = FN(fma)(n, FN(splat)(-0.693145751953125f), c);   /* 16 bits of ln 2: the product is exact */
    r = FN(fma)(n, FN(splat)(-1.42860682030941723e-6f), r); /* the rest */
    v8 p = FN(splat)(1.0f / 5040);
    p = FN(fma)(p, r, FN(splat)(1.0f / 720));
    p = FN(fma)(p, r, FN(splat)(1.0f / 120));
    p = FN(fma)(p, r, FN(splat)(1.0f / 24));
    p = FN(fma)(p, r, FN(splat)(1.0f / 6));
    p = FN(fma)(p, r, FN(splat)(0.5f));
    p = FN(fma)(p, r, FN(splat)(1.0f));
    p = FN(fma)(p, r, FN(splat)(1.0f));
    i8 k = (i8)t - (i8)magic, half = k >> 1;
    v8 result = p * (v8)((half + 127) << 23) * (v8)((k - half + 127) << 23);
    return FN(select)(x != x, x, result);
}
