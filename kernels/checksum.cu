// Checksum of device memory at the speed of memory: has any bit of the weight arena changed since it was loaded?
//
// Memory is cut into blocks of 16 MiB, the last one filled up with zeros; each gives 64 bits (kernels/checksum.py combines
// them and restates all of this in numpy). A block is 128 rows of 32,768 32-bit words. Each column is a polynomial mod 2^64,
//   h = h * MULTIPLIER + word,  row after row,
// and the block's value is the sum mod 2^64 of mix(h + (column + 1) * GOLDEN) over its columns, mix = the finalizer of
// SplitMix64 (Steele, Lea and Flood 2014), which is a bijection. Integer sums, so no order matters.
//
// What it finds for certain: any change within one 32-bit word (MULTIPLIER is odd, and a difference below 2^32 times an odd
// number is not 0 mod 2^64), and two different words of one column exchanged (MULTIPLIER = 5 mod 8, so MULTIPLIER^i -
// MULTIPLIER^j with |i - j| < 128 is divisible by 2^8 at most). Anything else is missed once in about 2^64.
//
// Launch: one block of threads a part; 32 parts of 1,024 columns make a block of memory; block 256, 4 columns (16 bytes) a thread.
// Bound: bytes over memory bandwidth; 2 multiply-adds a word.
#include "common.cuh"

namespace {

constexpr int THREADS = 256, PARTS = 32, ROWS = 128, VECTORS_A_ROW = THREADS * PARTS, UNROLL = 8;
constexpr uint32_t MULTIPLIER = 0x9E3779B5u;
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull;

__device__ __forceinline__ uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

__device__ __forceinline__ uint64_t block_sum(uint64_t value) {
    __shared__ uint64_t sums[THREADS / 32];
    for (int step = 1; step < 32; step *= 2) value += __shfl_xor_sync(0xFFFFFFFFu, (unsigned long long)value, step);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0;
    for (int warp = 0; warp < THREADS / 32; warp++) value += sums[warp];
    return value;
}

// Four columns from vector `start` on. GUARDED: what lies beyond `vectors` is zero.
template <bool GUARDED> __device__ __forceinline__ void run_columns(uint64_t (&h)[4], const uint4* memory, int64_t start, int64_t vectors) {
    for (int row = 0; row < ROWS; row += UNROLL) {
        uint4 words[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            int64_t at = start + (int64_t)(row + i) * VECTORS_A_ROW;
            words[i] = !GUARDED || at < vectors ? __ldcs(memory + at) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            h[0] = h[0] * MULTIPLIER + words[i].x;
            h[1] = h[1] * MULTIPLIER + words[i].y;
            h[2] = h[2] * MULTIPLIER + words[i].z;
            h[3] = h[3] * MULTIPLIER + words[i].w;
        }
    }
}

}  // namespace

// out[i] = sum of part first_part + i of the `vectors` x 16 bytes at `memory`, for i < gridDim.x.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
checksum(const Common common, const uint4* memory, int64_t vectors, uint64_t* out, int first_part) {
    begin_kernel(common);
    ptx::wait_for_previous();
    int part = first_part + (int)blockIdx.x, column = part % PARTS * THREADS + (int)threadIdx.x;
    int64_t start = (int64_t)(part / PARTS) * ROWS * VECTORS_A_ROW + column;
    uint64_t h[4] = {0, 0, 0, 0};
    if (start + (int64_t)(ROWS - 1) * VECTORS_A_ROW < vectors)
        run_columns<false>(h, memory, start, vectors);
    else
        run_columns<true>(h, memory, start, vectors);
    uint64_t sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) sum += mix(h[i] + (uint64_t)(4 * column + i + 1) * GOLDEN);
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
