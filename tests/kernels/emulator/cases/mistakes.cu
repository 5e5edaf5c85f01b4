// Kernels with one mistake each. tests/kernels/test_emulator_mistakes.py says how it must show.
#include "common.cuh"

// ---- missing waits: out must differ from the right answer, or between seeds
extern "C" __global__ void no_syncthreads(const Common common, int32_t* out) {
    begin_kernel(common);
    ptx::wait_for_previous();
    __shared__ int32_t shared[64];
    shared[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = shared[threadIdx.x ^ 33];
}
extern "C" __global__ void no_syncwarp(const Common common, int32_t* out) {
    begin_kernel(common);
    ptx::wait_for_previous();
    __shared__ int32_t shared[32];
    shared[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = shared[threadIdx.x ^ 1];
}
// The barrier before the buffer is filled again is missing.
extern "C" __global__ void no_second_syncthreads(const Common common, int32_t* out) {
    begin_kernel(common);
    ptx::wait_for_previous();
    __shared__ int32_t shared[64];
    for (int round = 0; round < 2; round++) {
        shared[threadIdx.x] = round * 64 + threadIdx.x;
        __syncthreads();
        out[round * 64 + threadIdx.x] = shared[threadIdx.x ^ 33];
    }
}
extern "C" __global__ void no_initialisation(const Common common, float* out) {
    begin_kernel(common);
    ptx::wait_for_previous();
    __shared__ float sums[64];
    sums[threadIdx.x] += 1.0f;
    out[threadIdx.x] = sums[threadIdx.x];
}
extern "C" __global__ void no_async_wait(const Common common, const int32_t* in, int32_t* out, int wait) {
    begin_kernel(common);
    ptx::wait_for_previous();
    __shared__ __align__(16) int32_t shared[128];
    ptx::cp_async_16(ptx::shared_address(shared + threadIdx.x * 4), in + threadIdx.x * 4);
    ptx::cp_async_commit();
    if (wait == 1) ptx::cp_async_wait<1>();  // lets the only group pending
    if (wait == 2) ptx::cp_async_wait<0>();
    for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = shared[threadIdx.x * 4 + i];
}
// Blocks that hand a sum on without an order.
extern "C" __global__ void block_order(const Common common, float* out) {
    begin_kernel(common);
    ptx::wait_for_previous();
    *out = *out * 0.5f + blockIdx.x;
}

// ---- errors
extern "C" __global__ void half_at_barrier(const Common common) {
    begin_kernel(common);
    ptx::wait_for_previous();
    if (threadIdx.x < 32) ptx::named_barrier(3, 64);
    else __syncthreads();
}
extern "C" __global__ void divergent_shuffle(const Common common, int32_t* out) {
    begin_kernel(common);
    ptx::wait_for_previous();
    if (threadIdx.x < 8) out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFF, threadIdx.x, 1);
    else __syncwarp();
}
extern "C" __global__ void returned_lane(const Common common, int32_t* out) {
    begin_kernel(common);
    ptx::wait_for_previous();
    if (threadIdx.x == 31) return;
    out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFF, threadIdx.x, 1);
}
extern "C" __global__ void wrong_mask(const Common common, int32_t* out) {
    begin_kernel(common);
    ptx::wait_for_previous();
    out[threadIdx.x] = __shfl_xor_sync(0x0000FFFF, threadIdx.x, 1);
}
extern "C" __global__ void two_counts(const Common common) {
    begin_kernel(common);
    ptx::wait_for_previous();
    ptx::named_barrier(1, threadIdx.x < 32 ? 64 : 96);
}
extern "C" __global__ void shared_overrun(const Common common, int at) {
    begin_kernel(common);
    ptx::wait_for_previous();
    DYNAMIC_SHARED(smem);
    smem[at] = 1;
}
extern "C" __global__ void global_access(const Common common, const int32_t* in, int32_t* out, int64_t at) {
    begin_kernel(common);
    ptx::wait_for_previous();
    if (threadIdx.x == 5) out[at] = in[at];
}
extern "C" __global__ void misaligned(const Common common, const float* in, float* out) {
    begin_kernel(common);
    ptx::wait_for_previous();
    *out = ((const float4*)in)->y;
}
extern "C" __global__ void misaligned_copy(const Common common, const float* in) {
    begin_kernel(common);
    ptx::wait_for_previous();
    DYNAMIC_SHARED(smem);
    ptx::cp_async_16(ptx::shared_address(smem), in);
}
extern "C" __global__ void array_overrun(const Common common, int32_t* out, int at) {
    begin_kernel(common);
    ptx::wait_for_previous();
    __shared__ int32_t shared[32];
    shared[at] = 1;
    out[0] = shared[at];
}
extern "C" __global__ void deep(const Common common, int32_t* out) {
    begin_kernel(common);
    ptx::wait_for_previous();
    volatile int32_t locals[40000];
    for (int i = 0; i < 40000; i++) locals[i] = i;
    out[0] = locals[out[0]];
}
extern "C" __global__ void divide(const Common common, int32_t* out, int by) {
    begin_kernel(common);
    ptx::wait_for_previous();
    out[0] = 7 / by;
}
extern "C" __global__ void spin(const Common common, const int32_t* flag) {
    begin_kernel(common);
    ptx::wait_for_previous();
    while (*(const volatile int32_t*)flag == 0) __nanosleep(20);
}

// ---- dependent launches
extern "C" __global__ void produce(const Common common, int32_t* out) {
    begin_kernel(common);
    ptx::wait_for_previous();
    int i = blockIdx.x * 64 + threadIdx.x;
    out[i] = i;
}
extern "C" __global__ void consume(const Common common, const int32_t* constant, const int32_t* in, int32_t* out, int mode) {
    begin_kernel(common);
    __shared__ __align__(16) int32_t shared[64 * 4];
    int i = blockIdx.x * 64 + threadIdx.x, sum = constant[i];
    if (mode == 1) sum += in[i];
    if (mode == 2) out[i] = 0;
    if (mode == 3) ptx::cp_async_16(ptx::shared_address(shared + threadIdx.x * 4), in + i / 4 * 4), ptx::cp_async_commit();
    if (mode != 4) ptx::wait_for_previous();
    if (mode == 3) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        sum += shared[threadIdx.x * 4 + i % 4];
    } else if (mode != 1) sum += in[i];
    out[i] = sum;
}

#if HAS_SM90
extern "C" __global__ void barrier_mistakes(const Common common, const int32_t* in, int32_t* out, int mistake) {
    begin_kernel(common);
    ptx::wait_for_previous();
    __shared__ __align__(16) int32_t shared[32];
    __shared__ uint64_t full;
    if (threadIdx.x == 0) {
        if (mistake != 1) ptx::mbarrier_init(&full, 1);
        ptx::mbarrier_arrive_expect(&full, mistake == 2 ? 256 : 128);  // 2: more bytes than come
        if (mistake == 3) ptx::mbarrier_arrive(&full);                 // one arrival too many
        ptx::bulk_copy(shared, in, 128, &full);
    }
    __syncthreads();
    if (mistake == 6) return;                                            // leaves the copy alone
    if (mistake != 4) ptx::mbarrier_wait(&full, mistake == 5 ? 1 : 0);  // 4: none, 5: the phase before
    out[threadIdx.x] = shared[threadIdx.x];
    if (mistake == 4 || mistake == 5) __syncthreads(), ptx::mbarrier_wait(&full, 0);
}
// 1: no wgmma_wait before the result is read, 2: no commit, 3: a warp is missing, 4: no fence
extern "C" __global__ void wgmma_mistakes(const Common common, float* out, int mistake) {
    begin_kernel(common);
    ptx::wait_for_previous();
    DYNAMIC_SHARED(smem);
    for (int i = threadIdx.x; i < 12288 / 2; i += 128) ((bf16*)smem)[i] = __float2bfloat16_rn(1.0f);
    ptx::fence_async_shared();
    __syncthreads();
    uint32_t a = ptx::shared_address(smem);
    float acc[16] = {};
    if (mistake == 3 && threadIdx.x >= 96) return;
    if (mistake != 4) ptx::wgmma_fence();
    ptx::wgmma<32>(acc, ptx::wgmma_descriptor(a), ptx::wgmma_descriptor(a + 8192), 1);
    if (mistake != 2) ptx::wgmma_commit();
    if (mistake != 1) ptx::wgmma_wait<0>();
    out[threadIdx.x] = acc[0];
    if (mistake == 1) ptx::wgmma_wait<0>();
}
// No cluster_sync at the end: a block may have ended when another signals it.
extern "C" __global__ void early_end(const Common common) {
    begin_kernel(common);
    ptx::wait_for_previous();
    __shared__ uint64_t bar;
    if (threadIdx.x == 0) ptx::mbarrier_init(&bar, 1);
    ptx::cluster_sync();
    if (ptx::cluster_rank() == 1 && threadIdx.x == 0) ptx::mbarrier_arrive_remote(&bar, 0);
}
#endif
