// Softmax weights as 64-bit integers: the arithmetic of engine/fixed_softmax.py, bit for bit.
//
// weight = rint(2^44 * exp((logit - top) / temperature)), 0 where the exponent is at or below -32. Doubles, every step
// rounded once (the files are compiled with -fmad=false); sums are integers, so they may be taken in any order.
#pragma once
#include "common.cuh"

using u64 = unsigned long long;

constexpr double ZERO_BELOW = -32.0;

// 2^(e / 64), correctly rounded (tests compare every weight with the table of fixed_softmax.py).
__device__ const double POWER_FRACTIONS[64] = {
    0x1.0000000000000p+0, 0x1.02c9a3e778061p+0, 0x1.059b0d3158574p+0, 0x1.0874518759bc8p+0,
    0x1.0b5586cf9890fp+0, 0x1.0e3ec32d3d1a2p+0, 0x1.11301d0125b51p+0, 0x1.1429aaea92de0p+0,
    0x1.172b83c7d517bp+0, 0x1.1a35beb6fcb75p+0, 0x1.1d4873168b9aap+0, 0x1.2063b88628cd6p+0,
    0x1.2387a6e756238p+0, 0x1.26b4565e27cddp+0, 0x1.29e9df51fdee1p+0, 0x1.2d285a6e4030bp+0,
    0x1.306fe0a31b715p+0, 0x1.33c08b26416ffp+0, 0x1.371a7373aa9cbp+0, 0x1.3a7db34e59ff7p+0,
    0x1.3dea64c123422p+0, 0x1.4160a21f72e2ap+0, 0x1.44e086061892dp+0, 0x1.486a2b5c13cd0p+0,
    0x1.4bfdad5362a27p+0, 0x1.4f9b2769d2ca7p+0, 0x1.5342b569d4f82p+0, 0x1.56f4736b527dap+0,
    0x1.5ab07dd485429p+0, 0x1.5e76f15ad2148p+0, 0x1.6247eb03a5585p+0, 0x1.6623882552225p+0,
    0x1.6a09e667f3bcdp+0, 0x1.6dfb23c651a2fp+0, 0x1.71f75e8ec5f74p+0, 0x1.75feb564267c9p+0,
    0x1.7a11473eb0187p+0, 0x1.7e2f336cf4e62p+0, 0x1.82589994cce13p+0, 0x1.868d99b4492edp+0,
    0x1.8ace5422aa0dbp+0, 0x1.8f1ae99157736p+0, 0x1.93737b0cdc5e5p+0, 0x1.97d829fde4e50p+0,
    0x1.9c49182a3f090p+0, 0x1.a0c667b5de565p+0, 0x1.a5503b23e255dp+0, 0x1.a9e6b5579fdbfp+0,
    0x1.ae89f995ad3adp+0, 0x1.b33a2b84f15fbp+0, 0x1.b7f76f2fb5e47p+0, 0x1.bcc1e904bc1d2p+0,
    0x1.c199bdd85529cp+0, 0x1.c67f12e57d14bp+0, 0x1.cb720dcef9069p+0, 0x1.d072d4a07897cp+0,
    0x1.d5818dcfba487p+0, 0x1.da9e603db3285p+0, 0x1.dfc97337b9b5fp+0, 0x1.e502ee78b3ff6p+0,
    0x1.ea4afa2a490dap+0, 0x1.efa1bee615a27p+0, 0x1.f50765b6e4540p+0, 0x1.fa7c1819e90d8p+0,};

struct SoftmaxScale {
    double top, temperature;
    double reciprocal;  // 1 / temperature, correctly rounded; 0: divide by the instruction
};

__device__ __forceinline__ SoftmaxScale softmax_scale(double top, double temperature) {
    // Outside this range the residuals below could overflow or vanish.
    bool usual = temperature > 0x1p-64 && temperature < 0x1p64;
    return {top, temperature, usual ? __ddiv_rn(1.0, temperature) : 0.0};
}

// z / temperature, correctly rounded. With y = RN(1/t), two residual steps make the quotient exact (Markstein 1990: the
// last step is exact when the quotient before it is within one unit and y is correctly rounded); a third of the cost of
// a double division.
__device__ __forceinline__ double divide_by_temperature(double z, const SoftmaxScale& scale) {
    if (scale.reciprocal == 0.0) return __ddiv_rn(z, scale.temperature);
    double quotient = __dmul_rn(z, scale.reciprocal);
    quotient = __fma_rn(__fma_rn(-quotient, scale.temperature, z), scale.reciprocal, quotient);
    return __fma_rn(__fma_rn(-quotient, scale.temperature, z), scale.reciprocal, quotient);
}

// `logit` <= top; may be -inf only where the temperature is 1. `fractions`: POWER_FRACTIONS, better in shared memory.
__device__ __forceinline__ u64 softmax_weight(float logit, const SoftmaxScale& scale, const double* fractions) {
    // Adding 1.5 * 2^52 (2^52 at the end) rounds to an integer, half to even, and leaves it in the low bits: rint without
    // the conversion instructions, which run at a quarter of the rate.
    constexpr double ROUND = 0x1.8p52, ROUND_POSITIVE = 0x1p52;
    double z = __dadd_rn((double)logit, -scale.top);
    if (scale.temperature != 1.0) z = divide_by_temperature(z, scale);
    z = z > ZERO_BELOW ? z : ZERO_BELOW;
    double rounded = __dadd_rn(__dmul_rn(z, -92.33248261893243), ROUND);
    int n = (int)(uint32_t)__double_as_longlong(rounded);
    double r = __dadd_rn(z, __dmul_rn(__dadd_rn(rounded, -ROUND), 0.6931471805599453 / 64));
    double p = __dmul_rn(r, 1.0 / 120);
    p = __dmul_rn(__dadd_rn(p, 1.0 / 24), r);
    p = __dmul_rn(__dadd_rn(p, 1.0 / 6), r);
    p = __dmul_rn(__dadd_rn(p, 0.5), r);
    p = __dmul_rn(__dadd_rn(p, 1.0), r);
    p = __dadd_rn(p, 1.0);
    int exponent = 44 * 64 - n;  // of 2^(44 - n/64), in 64ths
    double power = __longlong_as_double(__double_as_longlong(fractions[exponent & 63]) + ((long long)(exponent >> 6) << 52));
    return (u64)(__double_as_longlong(__dadd_rn(__dmul_rn(power, p), ROUND_POSITIVE)) & 0xFFFFFFFFFFFFFll);
}
