// Arithmetic, memory and atomic functions of one thread. Compiled with -ffp-contract=off: no fused operation but where
// the kernel asks for one, as nvcc -fmad=false. Included by cuda_emulator.h.
#pragma once

// ---- integers
#define EMULATOR_MIN_MAX(type)                                           \
    constexpr inline type min(type a, type b) { return b < a ? b : a; }  \
    constexpr inline type max(type a, type b) { return a < b ? b : a; }
EMULATOR_MIN_MAX(int)
EMULATOR_MIN_MAX(unsigned)
EMULATOR_MIN_MAX(long)
EMULATOR_MIN_MAX(unsigned long)
EMULATOR_MIN_MAX(long long)
EMULATOR_MIN_MAX(unsigned long long)
#undef EMULATOR_MIN_MAX
constexpr inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
constexpr inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
constexpr inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
constexpr inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz((unsigned)v); }
inline int __clzll(long long v) { return v == 0 ? 64 : __builtin_clzll((unsigned long long)v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline unsigned __brev(unsigned v) {
    unsigned out = 0;
    for (int i = 0; i < 32; i++) out |= (v >> i & 1) << (31 - i);
    return out;
}
inline unsigned long long __brevll(unsigned long long v) {
    return (unsigned long long)__brev((unsigned)v) << 32 | __brev((unsigned)(v >> 32));
}
inline int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        unsigned pick = selector >> 4 * i & 15, byte = (unsigned)(bytes >> 8 * (pick & 7)) & 0xFF;
        if (pick & 8) byte = byte & 0x80 ? 0xFF : 0;
        out |= byte << 8 * i;
    }
    return out;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned shift) {
    return (unsigned)((((uint64_t)hi << 32 | lo) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift) {
    return (unsigned)(((uint64_t)hi << 32 | lo) >> (shift & 31));
}

// ---- floating point
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __frsqrt_rn(float a) { return (float)(1.0 / sqrt((double)a)); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline double __dsqrt_rn(double a) { return sqrt(a); }
inline double __drcp_rn(double a) { return 1.0 / a; }
// Approximate on the device; kernels must not depend on their last bits.
inline float __expf(float a) { return expf(a); }
inline float __exp10f(float a) { return exp10f(a); }
inline float __logf(float a) { return logf(a); }
inline float __log2f(float a) { return log2f(a); }
inline float __sinf(float a) { return sinf(a); }
inline float __cosf(float a) { return cosf(a); }
inline float __powf(float a, float b) { return powf(a, b); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float a) { return __frsqrt_rn(a); }
inline double rsqrt(double a) { return 1.0 / sqrt(a); }
inline float __saturatef(float a) { return a > 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f; }

// ---- conversions to integers: out of range saturates; NaN as PTX ISA, cvt, says
template <class To, class From>
inline To emulator_saturate(From rounded) {
    if (rounded != rounded) return sizeof(To) == 8 || sizeof(From) == 8 ? (To)((To)1 << (8 * sizeof(To) - 1)) : 0;
    if (rounded < (From)std::numeric_limits<To>::min()) return std::numeric_limits<To>::min();
    if (rounded >= -2.0 * (From)(std::numeric_limits<To>::min() / 2) && std::is_signed_v<To>) return std::numeric_limits<To>::max();
    if (!std::is_signed_v<To> && rounded >= 2.0 * (From)(std::numeric_limits<To>::max() / 2 + 1)) return std::numeric_limits<To>::max();
    return (To)rounded;
}
inline int __float2int_rn(float v) { return emulator_saturate<int>(rintf(v)); }
inline int __float2int_rz(float v) { return emulator_saturate<int>(truncf(v)); }
inline int __float2int_rd(float v) { return emulator_saturate<int>(floorf(v)); }
inline int __float2int_ru(float v) { return emulator_saturate<int>(ceilf(v)); }
inline unsigned __float2uint_rn(float v) { return emulator_saturate<unsigned>(rintf(v)); }
inline unsigned __float2uint_rz(float v) { return emulator_saturate<unsigned>(truncf(v)); }
inline long long __float2ll_rn(float v) { return emulator_saturate<long long>(rintf(v)); }
inline long long __float2ll_rz(float v) { return emulator_saturate<long long>(truncf(v)); }
inline int __double2int_rn(double v) { return emulator_saturate<int>(rint(v)); }
inline int __double2int_rz(double v) { return emulator_saturate<int>(trunc(v)); }
inline long long __double2ll_rn(double v) { return emulator_saturate<long long>(rint(v)); }
inline long long __double2ll_rz(double v) { return emulator_saturate<long long>(trunc(v)); }
inline long long __double2ll_rd(double v) { return emulator_saturate<long long>(floor(v)); }
inline unsigned long long __double2ull_rn(double v) { return emulator_saturate<unsigned long long>(rint(v)); }
inline unsigned long long __double2ull_rz(double v) { return emulator_saturate<unsigned long long>(trunc(v)); }
inline unsigned long long __double2ull_rd(double v) { return emulator_saturate<unsigned long long>(floor(v)); }
inline float __int2float_rn(int v) { return (float)v; }
inline float __uint2float_rn(unsigned v) { return (float)v; }
inline float __ll2float_rn(long long v) { return (float)v; }
inline float __ull2float_rn(unsigned long long v) { return (float)v; }
inline float __double2float_rn(double v) { return (float)v; }
inline double __int2double_rn(int v) { return (double)v; }
inline double __uint2double_rn(unsigned v) { return (double)v; }
inline double __ll2double_rn(long long v) { return (double)v; }
inline double __ull2double_rn(unsigned long long v) { return (double)v; }

// ---- memory
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldca(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline T __ldlu(const T* p) { return *p; }
template <class T> inline T __ldcv(const T* p) { return *p; }
template <class T> inline void __stcg(T* p, T v) { *p = v; }
template <class T> inline void __stcs(T* p, T v) { *p = v; }
template <class T> inline void __stwb(T* p, T v) { *p = v; }
template <class T> inline void __stwt(T* p, T v) { *p = v; }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline size_t __cvta_generic_to_shared(const void* p) { return emulator::shared_address(p); }
inline size_t __cvta_generic_to_global(const void* p) { return (size_t)p; }
inline void* __cvta_shared_to_generic(size_t address) { return emulator::shared_pointer((uint32_t)address, 1, 1); }

// ---- atomics, on integers only: sums of floats would depend on the order of arrival
#define EMULATOR_ATOMIC(name, type, expression)     \
    inline type name(type* address, type value) {   \
        type old = *address;                        \
        *address = (expression);                    \
        return old;                                 \
    }
#define EMULATOR_ATOMICS(type)                                          \
    EMULATOR_ATOMIC(atomicAdd, type, old + value)                       \
    EMULATOR_ATOMIC(atomicMin, type, value < old ? value : old)         \
    EMULATOR_ATOMIC(atomicMax, type, old < value ? value : old)         \
    EMULATOR_ATOMIC(atomicAnd, type, old & value)                       \
    EMULATOR_ATOMIC(atomicOr, type, old | value)                        \
    EMULATOR_ATOMIC(atomicXor, type, old ^ value)                       \
    EMULATOR_ATOMIC(atomicExch, type, value)                            \
    inline type atomicCAS(type* address, type compare, type value) {    \
        type old = *address;                                            \
        if (old == compare) *address = value;                           \
        return old;                                                     \
    }
EMULATOR_ATOMICS(int)
EMULATOR_ATOMICS(unsigned)
EMULATOR_ATOMICS(unsigned long long)
#undef EMULATOR_ATOMICS
EMULATOR_ATOMIC(atomicSub, int, old - value)
EMULATOR_ATOMIC(atomicSub, unsigned, old - value)
EMULATOR_ATOMIC(atomicExch, float, value)
EMULATOR_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
EMULATOR_ATOMIC(atomicDec, unsigned, old == 0 || old > value ? value : old - 1)
EMULATOR_ATOMIC(atomicMin, long long, value < old ? value : old)
EMULATOR_ATOMIC(atomicMax, long long, old < value ? value : old)
#undef EMULATOR_ATOMIC

inline long long clock64() { return 0; }
inline void __trap() { emulator::fail("__trap"); }
inline void __builtin_assume(bool) {}
inline void __nanosleep(unsigned) { emulator::yield(); }
