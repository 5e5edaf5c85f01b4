// x[t] = table[token_ids[t]], widened to fp32: the residual stream's first value.
//
// token_ids (T,) int32; table_tiled (vocab, H) bf16 in tiles (common.cuh, "layouts": a row is 128 bytes of every tile);
// x (T, H) fp32. A token id outside the table is reported against slots[t] and gives zeros.
//
// One block a token, 16 bytes of the table a thread at a time. Launch: grid T, block H/8 rounded up to warps, at most 512.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(512)
embed(const Common common, const int32_t* token_ids, const int32_t* slots, const int32_t* positions, const bf16* table_tiled, float* x, int hidden, int k_pad, int vocab) {
    begin_kernel(common);
    ptx::wait_for_previous();
    int token = token_ids[blockIdx.x];
    bool valid = token >= 0 && token < vocab;
    if (!valid && threadIdx.x == 0) report_error(common, ERROR_TOKEN_RANGE, -1, slots[blockIdx.x], positions[blockIdx.x], token);
    float* row = x + (int64_t)blockIdx.x * hidden;
    for (int k = threadIdx.x * 8; k < hidden; k += blockDim.x * 8) {
        uint4 chunk = make_uint4(0, 0, 0, 0);
        if (valid) chunk = *reinterpret_cast<const uint4*>(table_tiled + tile_offset(token, k, k_pad));
        const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
        float wide[8];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            wide[2 * i] = __uint_as_float(words[i] << 16);
            wide[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
        }
        if (hidden % 4 == 0) {  // every row starts at a multiple of 16 bytes
            *reinterpret_cast<float4*>(row + k) = make_float4(wide[0], wide[1], wide[2], wide[3]);
            if (k + 4 < hidden) *reinterpret_cast<float4*>(row + k + 4) = make_float4(wide[4], wide[5], wide[6], wide[7]);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (k + i < hidden) row[k + i] = wide[i];
        }
    }
}
