// What every kernel shares: types, the first parameter, error reports, the trace of a profiled step.
//
// A kernel file includes only this. With APPLIANCE_EMULATE it is compiled by a host C++ compiler against the SIMT
// emulator of tests/kernels/emulator instead of nvcc, so that kernels are tested where there is no GPU.
#pragma once
#include <stdint.h>
#ifdef APPLIANCE_EMULATE
#include "cuda_emulator.h"
#else
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

using bf16 = __nv_bfloat16;

constexpr int PAGE_TOKENS = 128;  // engine/types.py:PAGE_TOKENS

// A kernel's shared memory beyond static arrays: `DYNAMIC_SHARED(smem)` declares `uint8_t* smem`, 1024-byte aligned.
#ifndef APPLIANCE_EMULATE
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) uint8_t name[]
#endif

// ---- what went wrong on the device ---------------------------------------------------------------------------------

enum ErrorCode : uint32_t {
    ERROR_NONE = 0,
    ERROR_PAGE_RANGE = 1,      // a block table entry outside the pool; value = the entry
    ERROR_POSITION_RANGE = 2,  // a position past the rope table or the block table; value = the position
    ERROR_TOKEN_RANGE = 3,     // a token id outside the vocabulary; value = the id
    ERROR_NONFINITE = 4,       // NaN or Inf in what a kernel produced; value = its element index
    ERROR_LOGITS = 5,          // a row of logits that cannot be sampled
};

struct ErrorEntry {  // 32 bytes, engine/cuda/errors.py reads it
    uint32_t code;  // written last; the host puts 0 back when it has read the entry
    uint32_t op;  // OpId below
    int32_t layer;
    int32_t head;
    int32_t slot;
    int32_t position;
    int32_t value;
    uint32_t sm;
};

constexpr uint32_t ERROR_RING_ENTRIES = 256;  // a power of two

struct ErrorRing {  // in mapped host memory; the host reads entries below `written`
    uint32_t written;
    uint32_t pad[7];
    ErrorEntry entries[ERROR_RING_ENTRIES];
};

enum OpId : uint32_t {
    OP_PREPARE = 0, OP_EMBED = 1, OP_RMSNORM = 2, OP_QKV = 3, OP_ROPE = 4, OP_ATTENTION = 5, OP_O = 6, OP_GATE_UP = 7,
    OP_DOWN = 8, OP_LM_HEAD = 9, OP_SAMPLER = 10,
};

// First parameter of every kernel, 40 bytes. engine/cuda/executor.py packs it.
struct Common {
    ErrorRing* errors;       // never null
    uint32_t* slot_errors;   // (max_slots + 1,): bit ErrorCode is set for a slot whose request must fail
    uint64_t* trace;         // null, or (number of launches of a step,): %globaltimer at the start of each kernel
    int32_t trace_index;     // this launch's place in trace
    int32_t layer;           // -1 outside the layers
    uint32_t op;
    uint32_t zero;           // 0, which the compiler does not know: warp_release
};

#include "ptx.cuh"

// Fail the request in `slot` and leave a report: one a slot, code and step (slot_errors is cleared by step_prepare), which
// is the first in time. NaN spreads: without that rule a long prefill would send millions of reports over the bus, and the
// ring would keep the last ones, which say nothing of where it began. Any thread; rare.
__device__ __noinline__ inline void report_error(const Common& common, ErrorCode code, int head, int slot, int position, int value) {
    if (atomicOr(&common.slot_errors[slot], 1u << code) >> code & 1u) return;
    uint32_t index = atomicAdd(&common.errors->written, 1u) % ERROR_RING_ENTRIES;
    ErrorEntry entry = {code, common.op, common.layer, head, slot, position, value, ptx::sm_id()};
    ErrorEntry* place = &common.errors->entries[index];
    place->op = entry.op, place->layer = entry.layer, place->head = entry.head, place->slot = entry.slot;
    place->position = entry.position, place->value = entry.value, place->sm = entry.sm;
    __threadfence_system();  // the host may read while a later step is still reporting
    *(volatile uint32_t*)&place->code = entry.code;
    __threadfence_system();
}

// Stamps the trace with the start of this kernel.
__device__ __forceinline__ void stamp_kernel(const Common& common) {
    if (common.trace != nullptr && threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0)
        common.trace[common.trace_index] = ptx::global_timer();
}

// Every kernel calls this first: lets the next kernel of the stream begin (it waits for our end before it touches what
// we write), and stamps the trace. (gemm_decode.cu stamps first and lets the next one begin later: see there.)
__device__ __forceinline__ void begin_kernel(const Common& common) {
    ptx::launch_dependents();
    stamp_kernel(common);
}

// A warp's arrival at a barrier, after what all its lanes did; the barrier is to be told to expect WARP_ARRIVALS of a warp.
// racecheck does not see that __syncwarp puts the other lanes' reads before lane 0's arrival, and calls every buffer that is
// filled again a race (kernels/LOG.md). So in the kernels that tests/gpu/sanitize.py compiles for it every lane arrives.
#ifdef APPLIANCE_RACECHECK
constexpr int WARP_ARRIVALS = 32;
#else
constexpr int WARP_ARRIVALS = 1;
#endif
#if HAS_SM90
__device__ __forceinline__ void warp_arrive(uint64_t* bar, int lane) {
    __syncwarp();
    if (WARP_ARRIVALS == 32 || lane == 0) ptx::mbarrier_arrive(bar);
}
// A warp gives a buffer back that it read with ldmatrix, to be filled again by bulk copies. An arrival waits for no ldmatrix
// in flight: nvcc counts on shared memory doing a warp's requests in order, but a bulk copy comes from elsewhere, and one was
// seen to overtake reads that stood behind stores with a TLB miss (LOG.md). So the barrier's address is made of `results`,
// TILES results of mma (4 floats each), into which all these reads went: mma had to wait for them. fence.proxy.async would do
// too; it also waits for stores, and took 4 % of a step of 64 rows.
template <int TILES> __device__ __forceinline__ void warp_release(uint64_t* bar, const float* results, uint32_t zero, int lane) {
    uint32_t bits = 0;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) bits |= __float_as_uint(results[4 * tile]);
    warp_arrive(bar + (bits & zero), lane);
}
#endif

// ---- layouts ---------------------------------------------------------------------------------------------------------

// A weight matrix W (N, K) bf16 lives in the arena as tiles of 16 rows x 64 columns, 2 KB each, tile (n/16, k/64) at
// ((n/16) * (K_pad/64) + k/64) * 2048 bytes: the 16 rows' whole K is one contiguous stream. N is padded to 16, K to 64,
// both with zeros. A tile is two "atoms" of 8 rows x 128 bytes in the 128-byte swizzle that TMA, wgmma and ldmatrix share
// (PTX ISA, "Shared memory matrix layout"): the 16-byte chunk c (0..7) of row r (0..7) stands at chunk c ^ r.
// gate_up: a 16-row tile holds 8 gate rows, then the 8 matching up rows, so that one thread holds both halves of a pair.
__host__ __device__ constexpr int64_t tile_offset(int n, int k, int k_pad) {  // in elements
    return ((int64_t)(n >> 4) * (k_pad >> 6) + (k >> 6)) * 1024 + ((n >> 3) & 1) * 512 + (n & 7) * 64 +
           ((((k >> 3) & 7) ^ (n & 7)) << 3) + (k & 7);
}

// K and V of one layer: (pages, kv heads) of 128 tokens x Dp bf16, Dp = head_dim padded to 64, 96, 128 or 256. A page lies
// in panels of 64 columns: 128 rows (tokens) of 128 bytes in the swizzle of the weights, so that a straight copy of a panel
// to shared memory can be read by ldmatrix without bank conflicts, and by wgmma. Dp = 96 is one panel of rows of 192 bytes
// with a swizzle of its own, for ldmatrix only.
__host__ __device__ constexpr int page_chunk(int chunk, int token, int dp) {  // place of a token's 16-byte chunk in its page
    return dp == 96 ? token * 12 + (chunk ^ ((token >> 1) & 3)) : (chunk >> 3) * (8 * PAGE_TOKENS) + token * 8 + ((chunk & 7) ^ (token & 7));
}
__host__ __device__ constexpr int64_t kv_offset(int64_t page, int head, int token, int d, int num_kv_heads, int dp) {
    return (page * num_kv_heads + head) * (PAGE_TOKENS * dp) + page_chunk(d >> 3, token, dp) * 8 + (d & 7);
}
