// Vector types, bf16 and fp16 (storage and conversions; kernels calculate in fp32). Included by cuda_emulator.h.
#pragma once

using uint = unsigned int;
using ushort = unsigned short;
using uchar = unsigned char;

#define EMULATOR_VECTORS(type, base, align2, align4)                                              \
    struct type##1 {                                                                              \
        base x;                                                                                   \
    };                                                                                            \
    struct __align__(align2) type##2 {                                                            \
        base x, y;                                                                                \
    };                                                                                            \
    struct __align__(align4) type##4 {                                                            \
        base x, y, z, w;                                                                          \
    };                                                                                            \
    inline type##1 make_##type##1(base x) { return {x}; }                                         \
    inline type##2 make_##type##2(base x, base y) { return {x, y}; }                              \
    inline type##4 make_##type##4(base x, base y, base z, base w) { return {x, y, z, w}; }
EMULATOR_VECTORS(char, signed char, 2, 4)
EMULATOR_VECTORS(uchar, unsigned char, 2, 4)
EMULATOR_VECTORS(short, short, 4, 8)
EMULATOR_VECTORS(ushort, unsigned short, 4, 8)
EMULATOR_VECTORS(int, int, 8, 16)
EMULATOR_VECTORS(uint, unsigned, 8, 16)
EMULATOR_VECTORS(float, float, 8, 16)
EMULATOR_VECTORS(longlong, long long, 16, 16)
EMULATOR_VECTORS(ulonglong, unsigned long long, 16, 16)
EMULATOR_VECTORS(double, double, 16, 16)
#undef EMULATOR_VECTORS
struct int3 {
    int x, y, z;
};
struct float3 {
    float x, y, z;
};
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline int3 make_int3(int x, int y, int z) { return {x, y, z}; }
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// ---- reinterpretation
template <class To, class From>
inline To emulator_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
inline float __int_as_float(int v) { return emulator_bits<float>(v); }
inline float __uint_as_float(unsigned v) { return emulator_bits<float>(v); }
inline int __float_as_int(float v) { return emulator_bits<int>(v); }
inline unsigned __float_as_uint(float v) { return emulator_bits<unsigned>(v); }
inline double __longlong_as_double(long long v) { return emulator_bits<double>(v); }
inline long long __double_as_longlong(double v) { return emulator_bits<long long>(v); }
inline double __hiloint2double(int hi, int lo) { return __longlong_as_double((long long)hi << 32 | (unsigned)lo); }
inline int __double2hiint(double v) { return (int)(__double_as_longlong(v) >> 32); }
inline int __double2loint(double v) { return (int)__double_as_longlong(v); }

// ---- bf16: round to nearest even, NaN becomes 0x7FFF
inline uint16_t emulator_to_bf16(float value) {
    uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
struct __align__(2) __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float value) : bits(emulator_to_bf16(value)) {}
    operator float() const { return __uint_as_float((uint32_t)bits << 16); }
};
struct __align__(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    __nv_bfloat162(__nv_bfloat16 x_, __nv_bfloat16 y_) : x(x_), y(y_) {}
};
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short v) { return emulator_bits<__nv_bfloat16>(v); }
inline __nv_bfloat16 __short_as_bfloat16(short v) { return emulator_bits<__nv_bfloat16>(v); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.bits; }
inline short __bfloat16_as_short(__nv_bfloat16 v) { return (short)v.bits; }
inline __nv_bfloat16 __float2bfloat16(float v) { return __nv_bfloat16(v); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) { return __nv_bfloat16(v); }
inline float __bfloat162float(__nv_bfloat16 v) { return (float)v; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __floats2bfloat162_rn(v.x, v.y); }
inline __nv_bfloat162 __float2bfloat162_rn(float v) { return __floats2bfloat162_rn(v, v); }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {(float)v.x, (float)v.y}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 v) { return {v, v}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
inline float __low2float(__nv_bfloat162 v) { return (float)v.x; }
inline float __high2float(__nv_bfloat162 v) { return (float)v.y; }
inline bool __hisnan(__nv_bfloat16 v) { return (v.bits & 0x7FFF) > 0x7F80; }

// ---- fp16: round to nearest even, NaN becomes 0x7FFF
inline uint16_t emulator_to_half(float value) {
    uint32_t bits = __float_as_uint(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return 0x7FFF;
    if (magnitude >= 0x477FF000) return (uint16_t)(sign | 0x7C00);  // 65520 and more round to infinity
    if (magnitude < 0x38800000) {                                   // below 2^-14: multiples of 2^-24
        float scaled = __uint_as_float(magnitude) * 16777216.0f;
        return (uint16_t)(sign | (uint32_t)rintf(scaled));
    }
    return (uint16_t)(sign | ((magnitude + 0xFFF + (magnitude >> 13 & 1)) >> 13) - (112 << 10));
}
inline float emulator_from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3FF;
    if (exponent == 31) return __uint_as_float(sign | 0x7F800000 | fraction << 13);
    if (exponent == 0) return __uint_as_float(sign | __float_as_uint((float)fraction * 0x1p-24f));
    return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
}
struct __align__(2) __half {
    uint16_t bits;
    __half() = default;
    __half(float value) : bits(emulator_to_half(value)) {}
    operator float() const { return emulator_from_half(bits); }
};
struct __align__(4) __half2 {
    __half x, y;
};
using half = __half;
using half2 = __half2;
inline __half __ushort_as_half(unsigned short v) { return emulator_bits<__half>(v); }
inline unsigned short __half_as_ushort(__half v) { return v.bits; }
inline __half __float2half(float v) { return __half(v); }
inline __half __float2half_rn(float v) { return __half(v); }
inline float __half2float(__half v) { return (float)v; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline float2 __half22float2(__half2 v) { return {(float)v.x, (float)v.y}; }
