// Weights on their way into the arena: a piece of a row-major matrix, as it lies in the checkpoint, becomes bf16 tiles.
//
// src: elements first_element .. first_element + count - 1 of a matrix (rows, columns) in row-major order, dtype 0 bf16,
// 1 fp16, 2 fp32; any piece, whole rows or not. tiled: the destination matrix (common.cuh, "layouts"), zeroed before. Row r
// goes to row row0 + r; with row_map 1 or 2 (gate, up of gate_up) to row r/8*16 + r%8, + 8 for up. Conversion rounds to nearest
// even, as engine/convert.py does, NaN included; finite values that become Inf are counted in *overflows.
//
// A thread converts 8 neighbours of a row, 16 bytes of the result, which a whole 128-byte line of a tile gets from 8 threads.
// Where a piece begins or ends inside those 8, each side writes only its own elements.
// Launch: a grid-stride loop over ceil(columns/8) chunks of every row touched; block 256. Bound: the bus that feeds it (55 GB/s).
#include "common.cuh"

namespace {

enum SourceDtype { SOURCE_BF16 = 0, SOURCE_FP16 = 1, SOURCE_FP32 = 2 };
enum RowMap { ROW_PLAIN = 0, ROW_GATE = 1, ROW_UP = 2 };

// Nearest, ties to even; NaN keeps its sign and upper payload and is made quiet. Integer arithmetic, because
// cvt.rn.bf16.f32 makes every NaN the same.
__device__ __forceinline__ uint16_t round_to_bf16(uint32_t bits, uint32_t& overflows) {
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return (uint16_t)(bits >> 16 | 0x40u);
    overflows += magnitude >= 0x7F7F8000u && magnitude < 0x7F800000u;
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

// Exact: exponent and mantissa moved into place give the value times 2^-112 (subnormals too).
__device__ __forceinline__ uint32_t widen_fp16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = (uint32_t)(half & 0x7FFFu) << 13;
    if ((half & 0x7C00u) == 0x7C00u) return sign | 0x7F800000u | (half & 0x3FFu) << 13;
    return sign | __float_as_uint(__fmul_rn(__uint_as_float(rest), __uint_as_float(0x77800000u)));
}

__device__ __forceinline__ uint32_t load_as_fp32(const void* src, int dtype, int64_t index) {
    if (dtype == SOURCE_FP32) return static_cast<const uint32_t*>(src)[index];
    uint16_t half = static_cast<const uint16_t*>(src)[index];
    return dtype == SOURCE_BF16 ? (uint32_t)half << 16 : widen_fp16(half);
}

__device__ __forceinline__ uint16_t load_as_bf16(const void* src, int dtype, int64_t index, uint32_t& overflows) {
    if (dtype == SOURCE_BF16) return static_cast<const uint16_t*>(src)[index];
    return round_to_bf16(load_as_fp32(src, dtype, index), overflows);
}

// Eight elements from `index`, whose address is a multiple of 16 bytes.
__device__ __forceinline__ uint4 load_8_as_bf16(const void* src, int dtype, int64_t index, uint32_t& overflows) {
    uint32_t wide[8], words[4];
    if (dtype == SOURCE_FP32) {
        const uint4* from = reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(src) + index);
        uint4 low = __ldcs(from), high = __ldcs(from + 1);
        wide[0] = low.x, wide[1] = low.y, wide[2] = low.z, wide[3] = low.w;
        wide[4] = high.x, wide[5] = high.y, wide[6] = high.z, wide[7] = high.w;
    } else {
        uint4 halves = __ldcs(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(src) + index));
        if (dtype == SOURCE_BF16) return halves;
        const uint32_t pairs[4] = {halves.x, halves.y, halves.z, halves.w};
#pragma unroll
        for (int i = 0; i < 8; i++) wide[i] = widen_fp16((uint16_t)(pairs[i / 2] >> (i % 2 * 16)));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t low = round_to_bf16(wide[2 * i], overflows), high = round_to_bf16(wide[2 * i + 1], overflows);
        words[i] = low | high << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ int mapped_row(int row, int row_map, int row0) {
    if (row_map == ROW_PLAIN) return row0 + row;
    return (row >> 3 << 4) + (row & 7) + (row_map == ROW_UP ? 8 : 0);
}

}  // namespace

// src must be aligned to 16 bytes.
extern "C" __global__ void __launch_bounds__(256)
retile(const Common common, const void* src, int dtype, bf16* tiled, int64_t first_element, int64_t count, int columns, int k_pad, int row_map, int row0, uint32_t* overflows) {
    begin_kernel(common);
    ptx::wait_for_previous();
    uint32_t chunks_a_row = ((uint32_t)columns + 7) / 8, too_large = 0;
    int first_row = (int)(first_element / columns), last_row = (int)((first_element + count - 1) / columns);
    uint32_t chunks = (uint32_t)(last_row - first_row + 1) * chunks_a_row;
    bool aligned = columns % 8 == 0 && first_element % 8 == 0;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < chunks; i += gridDim.x * blockDim.x) {
        int row = first_row + (int)(i / chunks_a_row), k = (int)(i % chunks_a_row) * 8, size = min(8, columns - k);
        int64_t index = (int64_t)row * columns + k - first_element;  // in src, of the first of the eight
        bf16* to = tiled + tile_offset(mapped_row(row, row_map, row0), k, k_pad);
        if (aligned && index >= 0 && index + 8 <= count) {
            *reinterpret_cast<uint4*>(to) = load_8_as_bf16(src, dtype, index, too_large);
        } else {
            for (int j = 0; j < size; j++)
                if (index + j >= 0 && index + j < count)
                    reinterpret_cast<uint16_t*>(to)[j] = load_as_bf16(src, dtype, index + j, too_large);
        }
    }
    if (too_large != 0) atomicAdd(overflows, too_large);
}

// out[i] = src[i] as fp32, exact: norm weights, biases. Launch: grid-stride, block 256.
extern "C" __global__ void __launch_bounds__(256)
copy_f32(const Common common, const void* src, int dtype, float* out, int64_t count) {
    begin_kernel(common);
    ptx::wait_for_previous();
    for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        reinterpret_cast<uint32_t*>(out)[i] = load_as_fp32(src, dtype, i);
}

// The way back, for tests and for looking into an arena: out (rows, columns) bf16 row-major. Launch: grid-stride, block 256.
extern "C" __global__ void __launch_bounds__(256)
untile(const Common common, const bf16* tiled, bf16* out, int rows, int columns, int k_pad, int row_map, int row0) {
    begin_kernel(common);
    ptx::wait_for_previous();
    for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < (int64_t)rows * columns; i += gridDim.x * blockDim.x)
        out[i] = tiled[tile_offset(mapped_row((int)(i / columns), row_map, row0), (int)(i % columns), k_pad)];
}
