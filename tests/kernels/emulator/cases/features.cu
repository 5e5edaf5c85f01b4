// One kernel for each thing the emulator must do as the device does. Run by tests/kernels/test_emulator.py.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) identity(const Common common, int32_t* out, float f, int64_t wide, const __grid_constant__ TensorMap) {
    begin_kernel(common);
    ptx::wait_for_previous();
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    int threads = blockDim.x * blockDim.y * blockDim.z;
    out[block * threads + thread] = block * 1000 + thread + (int)f + (int)(wide >> 32);
}

// ---- warps: row i of out (32 columns) is the result of instruction i
extern "C" __global__ void shuffles(const Common common, const int32_t* in, int32_t* out) {
    begin_kernel(common);
    ptx::wait_for_previous();
    int lane = threadIdx.x, v = in[lane], row = 0;
    auto put = [&](int value) { out[row++ * 32 + lane] = value; };
    put(__shfl_sync(0xFFFFFFFF, v, 5));
    put(__shfl_sync(0xFFFFFFFF, v, 3, 8));
    put(__shfl_xor_sync(0xFFFFFFFF, v, 16));
    put(__shfl_up_sync(0xFFFFFFFF, v, 2, 16));
    put(__shfl_down_sync(0xFFFFFFFF, v, 3));
    put((int)__ballot_sync(0xFFFFFFFF, v & 1));
    put((int)__match_any_sync(0xFFFFFFFF, v % 3));
    put((int)__reduce_max_sync(0xFFFFFFFF, v));
    put(__any_sync(0xFFFFFFFF, v == in[7]));
    put(__all_sync(0xFFFFFFFF, v == in[7]));
    // Halves of a warp that go different ways, and meet on their own.
    put(lane < 16 ? __shfl_xor_sync(0x0000FFFF, v, 1) : __shfl_xor_sync(0xFFFF0000, v * 2, 2));
    put((int)(__shfl_xor_sync(0xFFFFFFFF, (unsigned long long)v << 33, 1) >> 33));
}

// ---- blocks
template <int THREADS> __device__ int block_sum(int v) {  // a static array in a template
    __shared__ int parts[THREADS / 32];
    v = __reduce_add_sync(0xFFFFFFFF, v);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
    __syncthreads();
    int sum = 0;
    for (int i = 0; i < THREADS / 32; i++) sum += parts[i];
    return sum;
}
extern "C" __global__ void sums(const Common common, const int32_t* in, int32_t* out) {
    begin_kernel(common);
    ptx::wait_for_previous();
    int sum = block_sum<256>(in[blockIdx.x * 256 + threadIdx.x]);
    if (threadIdx.x >= 64) return;  // __syncthreads goes on without those that have returned
    __syncthreads();
    int odd = __syncthreads_count(threadIdx.x & 1);
    if (threadIdx.x == 0) out[blockIdx.x] = sum * 100 + odd;
}

// The last block to arrive adds up what the others left, as decode attention does.
extern "C" __global__ void last_block(const Common common, const int32_t* in, int32_t* partial, unsigned* counter, int32_t* out) {
    begin_kernel(common);
    ptx::wait_for_previous();
    __shared__ bool last;
    int sum = block_sum<64>(in[blockIdx.x * 64 + threadIdx.x]);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = sum;
        __threadfence();
        last = atomicAdd(counter, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last || threadIdx.x != 0) return;
    int total = 0;
    for (unsigned i = 0; i < gridDim.x; i++) total += partial[i];
    *out = total;
}

// Two warps write, two read, in turns: named barriers 1 (full) and 2 (empty), arrivals without waiting.
extern "C" __global__ void turns(const Common common, int32_t* out, int rounds) {
    begin_kernel(common);
    ptx::wait_for_previous();
    __shared__ int buffer[64];
    for (int round = 0; round < rounds; round++) {
        if (threadIdx.x < 64) {
            if (round > 0) ptx::named_barrier(2, 128);
            buffer[threadIdx.x] = round * 64 + threadIdx.x;
            ptx::named_barrier_arrive(1, 128);
        } else {
            ptx::named_barrier(1, 128);
            out[round * 64 + threadIdx.x - 64] = buffer[63 - (threadIdx.x - 64)];
            if (round + 1 < rounds) ptx::named_barrier_arrive(2, 128);
        }
    }
}

extern "C" __global__ void atomics(const Common common, int32_t* i, uint32_t* u, unsigned long long* w) {
    begin_kernel(common);
    ptx::wait_for_previous();
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&i[0], t);
    atomicMax(&i[1], t);
    atomicMin(&i[2], -t);
    atomicOr(&u[0], 1u << t % 32);
    atomicXor(&u[1], (uint32_t)t);
    atomicAdd(&w[0], (unsigned long long)t << 32);
    atomicMax(&w[1], (unsigned long long)t);
    if (t == 3) atomicCAS(&u[2], 7u, 9u);
}

// ---- asynchronous copies: two stages; row r of in (16 floats) is cut after valid[r] bytes of each 16
extern "C" __global__ void staged(const Common common, const float* in, const int32_t* valid, float* out, int rows) {
    begin_kernel(common);
    ptx::wait_for_previous();
    DYNAMIC_SHARED(smem);
    auto fetch = [&](int r) {
        if (r < rows) ptx::cp_async_16(ptx::shared_address(smem + (r % 2) * 64 + threadIdx.x * 16), in + r * 16 + threadIdx.x * 4, valid[r]);
        ptx::cp_async_commit();
    };
    fetch(0);
    for (int r = 0; r < rows; r++) {
        fetch(r + 1);
        ptx::cp_async_wait<1>();
        __syncthreads();
        out[r * 16 + threadIdx.x] = ((const float*)(smem + (r % 2) * 64))[threadIdx.x];
        if (threadIdx.x + 4 < 16) for (int i = 4; i < 16; i += 4) out[r * 16 + threadIdx.x + i] = ((const float*)(smem + (r % 2) * 64))[threadIdx.x + i];
        __syncthreads();
    }
}

// ---- tensor cores: d (16, 8) = a (16, 16) b, b (8, 16) as rows of n or, transposed, (16, 8) as rows of k
extern "C" __global__ void multiply(const Common common, const bf16* a, const bf16* b, float* d, int transposed) {
    begin_kernel(common);
    ptx::wait_for_previous();
    __shared__ __align__(16) bf16 sa[256], sb[128];
    int lane = threadIdx.x, g = lane / 4, q = lane % 4;
    for (int i = lane; i < 256; i += 32) sa[i] = a[i];
    for (int i = lane; i < 128; i += 32) sb[i] = b[i];
    __syncwarp();
    uint32_t fa[4], fb[2];
    ptx::ldmatrix_x4(fa, ptx::shared_address(sa + lane % 16 * 16 + lane / 16 * 8));
    if (transposed) ptx::ldmatrix_x2_trans(fb, ptx::shared_address(sb + lane % 16 * 8));
    else ptx::ldmatrix_x2(fb, ptx::shared_address(sb + lane % 8 * 16 + lane / 8 % 2 * 8));
    float acc[4] = {};
    ptx::mma_16816(acc, fa, fb[0], fb[1]);
    for (int i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + 2 * q + i % 2] = acc[i];
}
extern "C" __global__ void load_transposed(const Common common, const bf16* in, uint16_t* out) {  // four 8 x 8 matrices
    begin_kernel(common);
    ptx::wait_for_previous();
    __shared__ __align__(16) bf16 tile[256];
    for (int i = threadIdx.x; i < 256; i += 32) tile[i] = in[i];
    __syncwarp();
    uint32_t r[4];
    ptx::ldmatrix_x4_trans(r, ptx::shared_address(tile + threadIdx.x * 8));
    for (int i = 0; i < 4; i++)
        for (int h = 0; h < 2; h++) out[i * 64 + threadIdx.x / 4 * 8 + threadIdx.x % 4 * 2 + h] = (uint16_t)(r[i] >> 16 * h);
}

#if HAS_SM90
// A box as it lies in shared memory, and back through a store.
extern "C" __global__ void box(const Common common, const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap target, uint16_t* out, int x, int y, int rows) {
    begin_kernel(common);
    ptx::wait_for_previous();
    DYNAMIC_SHARED(smem);
    __shared__ uint64_t full;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&full, 1);
        ptx::mbarrier_fence_init();
        ptx::mbarrier_arrive_expect(&full, rows * 128);
        ptx::tma_load_2d(smem, &map, x, y, &full);
    }
    __syncthreads();
    ptx::mbarrier_wait(&full, 0);
    for (int i = threadIdx.x; i < rows * 64; i += blockDim.x) out[i] = ((const uint16_t*)smem)[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::tma_store_2d(&target, x, y, smem);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
    }
}

// out[i] = sum over rounds of in[round][i]: one producing warp, three that consume, a ring of STAGES buffers.
extern "C" __global__ void __launch_bounds__(128) ring(const Common common, const int32_t* in, int32_t* out, int rounds) {
    constexpr int STAGES = 3, COUNT = 96;
    begin_kernel(common);
    ptx::wait_for_previous();
    DYNAMIC_SHARED(smem);
    __shared__ uint64_t full[STAGES], empty[STAGES];
    if (threadIdx.x == 0)
        for (int i = 0; i < STAGES; i++) ptx::mbarrier_init(&full[i], 1), ptx::mbarrier_init(&empty[i], COUNT);
    __syncthreads();
    if (threadIdx.x < 32) {
        for (int round = 0; round < rounds && threadIdx.x == 0; round++) {
            if (round >= STAGES) ptx::mbarrier_wait(&empty[round % STAGES], (round / STAGES - 1) & 1);
            ptx::mbarrier_arrive_expect(&full[round % STAGES], COUNT * 4);
            ptx::bulk_copy(smem + round % STAGES * COUNT * 4, in + round * COUNT, COUNT * 4, &full[round % STAGES]);
        }
        return;
    }
    int sum = 0, i = threadIdx.x - 32;
    for (int round = 0; round < rounds; round++) {
        while (!ptx::mbarrier_try_wait(&full[round % STAGES], round / STAGES & 1)) {}
        sum += ((const int32_t*)smem)[round % STAGES * COUNT + i];
        ptx::mbarrier_arrive(&empty[round % STAGES]);
    }
    out[i] = sum;
}

// d (64, 32) = a (64, K) b (32, K)^T by wgmma, two stages fed by TMA.
extern "C" __global__ void __launch_bounds__(160) warpgroup(const Common common, const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, float* d, int k_blocks) {
    begin_kernel(common);
    ptx::wait_for_previous();
    DYNAMIC_SHARED(smem);
    __shared__ uint64_t full[2], empty[2];
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; i++) ptx::mbarrier_init(&full[i], 1), ptx::mbarrier_init(&empty[i], 128);
    __syncthreads();
    if (threadIdx.x >= 128) {
        for (int k = 0; k < k_blocks && threadIdx.x == 128; k++) {
            if (k >= 2) ptx::mbarrier_wait(&empty[k % 2], (k / 2 - 1) & 1);
            ptx::mbarrier_arrive_expect(&full[k % 2], (64 + 32) * 128);
            ptx::tma_load_2d(smem + k % 2 * 12288, &a_map, k * 64, 0, &full[k % 2]);
            ptx::tma_load_2d(smem + k % 2 * 12288 + 8192, &b_map, k * 64, 0, &full[k % 2]);
        }
        return;
    }
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    float acc[16];  // the first wgmma does not read it
    for (int k = 0; k < k_blocks; k++) {
        ptx::mbarrier_wait(&full[k % 2], k / 2 & 1);
        uint32_t a = ptx::shared_address(smem + k % 2 * 12288), b = a + 8192;
        ptx::wgmma_fence();
        for (int step = 0; step < 4; step++) ptx::wgmma<32>(acc, ptx::wgmma_descriptor(a + 32 * step), ptx::wgmma_descriptor(b + 32 * step), k + step);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::mbarrier_arrive(&empty[k % 2]);
    }
    for (int i = 0; i < 16; i++) d[(16 * warp + g + i / 2 % 2 * 8) * 32 + i / 4 * 8 + 2 * q + i % 2] = acc[i];
}

// d (64, 64) = a (64, 32) b (32, 64): a from registers, b as rows of k (N-major).
extern "C" __global__ void __launch_bounds__(128) warpgroup_transposed(const Common common, const bf16* a, const __grid_constant__ TensorMap b_map, float* d) {
    begin_kernel(common);
    ptx::wait_for_previous();
    DYNAMIC_SHARED(smem);
    __shared__ uint64_t full;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&full, 1);
        ptx::mbarrier_arrive_expect(&full, 32 * 128);
        ptx::tma_load_2d(smem, &b_map, 0, 0, &full);
    }
    __syncthreads();
    ptx::mbarrier_wait(&full, 0);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    float acc[32] = {};
    uint32_t fa[2][4];
    for (int step = 0; step < 2; step++)
        for (int i = 0; i < 4; i++) {
            int row = 16 * warp + g + i % 2 * 8, column = step * 16 + 2 * q + i / 2 * 8;
            fa[step][i] = *(const uint32_t*)(a + row * 32 + column);
        }
    ptx::wgmma_fence();
    for (int step = 0; step < 2; step++) ptx::wgmma_transposed<64>(acc, fa[step], ptx::wgmma_descriptor(ptx::shared_address(smem) + step * 2048), step);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    for (int i = 0; i < 32; i++) d[(16 * warp + g + i / 2 % 2 * 8) * 64 + i / 4 * 8 + 2 * q + i % 2] = acc[i];
}

// Each block of a cluster copies its share into all; out (blocks, cluster * 64) is what each block then holds. Twice, so
// that a block must hear from all before it writes again.
extern "C" __global__ void share(const Common common, const int32_t* in, int32_t* out) {
    begin_kernel(common);
    ptx::wait_for_previous();
    __shared__ __align__(16) int32_t all[4 * 64];
    __shared__ uint64_t full, empty;
    uint32_t rank = ptx::cluster_rank(), size = ptx::cluster_size();
    if (threadIdx.x == 0) ptx::mbarrier_init(&full, 1), ptx::mbarrier_init(&empty, (int)size);
    ptx::cluster_sync();
    for (int round = 0; round < 2; round++) {
        if (threadIdx.x == 0) {
            if (round > 0) ptx::mbarrier_wait(&empty, 0);
            ptx::mbarrier_arrive_expect(&full, (int)size * 256);
            ptx::bulk_copy_multicast(all + rank * 64, in + (round * gridDim.x + blockIdx.x) * 64, 256, &full, (1u << size) - 1);
        }
        ptx::mbarrier_wait(&full, round);
        for (uint32_t i = threadIdx.x; i < size * 64; i += blockDim.x) out[(round * gridDim.x + blockIdx.x) * size * 64 + i] = all[i];
        __syncthreads();
        if (threadIdx.x < size) ptx::mbarrier_arrive_remote(&empty, threadIdx.x);
    }
    ptx::cluster_sync();
}
#endif
