// What single threads compute. tests/kernels/test_emulator_arithmetic.py has the expected values.
#include "common.cuh"

extern "C" __global__ void to_bf16(const Common common, const float* in, uint16_t* out, int n) {
    begin_kernel(common);
    ptx::wait_for_previous();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __bfloat16_as_ushort(__float2bfloat16_rn(in[i]));
}
extern "C" __global__ void to_half(const Common common, const float* in, uint16_t* out, int n) {
    begin_kernel(common);
    ptx::wait_for_previous();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __half_as_ushort(__float2half_rn(in[i]));
}
extern "C" __global__ void widen(const Common common, float* from_bf16, float* from_half) {
    begin_kernel(common);
    ptx::wait_for_previous();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    from_bf16[i] = __bfloat162float(__ushort_as_bfloat16((unsigned short)i));
    from_half[i] = __half2float(__ushort_as_half((unsigned short)i));
}
extern "C" __global__ void integers(const Common common, const uint32_t* a, const uint32_t* b, uint64_t* out, int n) {
    begin_kernel(common);
    ptx::wait_for_previous();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        uint32_t x = a[i], y = b[i];
        unsigned long long wide = (unsigned long long)x << 32 | y, other = (unsigned long long)y << 32 | x;
        uint64_t* row = out + (int64_t)i * 12;
        row[0] = __umulhi(x, y);
        row[1] = (uint32_t)__mulhi((int)x, (int)y);
        row[2] = __umul64hi(wide, other);
        row[3] = (uint64_t)__mul64hi((long long)wide, (long long)other);
        row[4] = (uint64_t)__clz((int)x);
        row[5] = (uint64_t)__clzll((long long)wide);
        row[6] = (uint64_t)__popcll(wide);
        row[7] = (uint64_t)__ffs((int)x);
        row[8] = __brev(x);
        row[9] = __funnelshift_l(x, y, y);
        row[10] = __funnelshift_r(x, y, x);
        row[11] = __byte_perm(x, y, x ^ y);
    }
}
extern "C" __global__ void to_integers(const Common common, const double* in, int64_t* out, int n) {
    begin_kernel(common);
    ptx::wait_for_previous();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float f = (float)in[i];
        int64_t* row = out + (int64_t)i * 6;
        row[0] = __float2int_rn(f);
        row[1] = __float2uint_rn(f);
        row[2] = __float2ll_rn(f);
        row[3] = __double2int_rn(in[i]);
        row[4] = __double2ll_rn(in[i]);
        row[5] = (int64_t)__double2ull_rn(in[i]);
    }
}
// Products and sums round on their own; only fmaf does not.
extern "C" __global__ void rounding(const Common common, const float* a, const float* b, const float* c, float* out, int n) {
    begin_kernel(common);
    ptx::wait_for_previous();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float* row = out + (int64_t)i * 6;
        row[0] = a[i] * b[i] + c[i];
        row[1] = __fadd_rn(__fmul_rn(a[i], b[i]), c[i]);
        row[2] = __fmaf_rn(a[i], b[i], c[i]);
        row[3] = __fdiv_rn(a[i], b[i]);
        row[4] = __fsqrt_rn(fabsf(a[i]));
        row[5] = __frcp_rn(b[i]);
    }
}
