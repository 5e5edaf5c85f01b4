// The instructions CUDA C++ has no names for, one inline function each (PTX ISA 9.0). Included by common.cuh only.
//
// The emulator (tests/kernels/emulator) has the same functions in C++. Add to both.
#pragma once
#ifndef APPLIANCE_EMULATE

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define HAS_SM90 1  // bulk copies, mbarriers with transaction counts, programmatic dependent launch
#else
#define HAS_SM90 0
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA 1
#else
#define HAS_WGMMA 0
#endif

using TensorMap = CUtensorMap;  // a kernel takes it as `const __grid_constant__ TensorMap map`

namespace ptx {

__device__ __forceinline__ uint32_t sm_id() { uint32_t id; asm volatile("mov.u32 %0, %%smid;" : "=r"(id)); return id; }
__device__ __forceinline__ uint64_t global_timer() { uint64_t t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// ---- programmatic dependent launch (no-ops before sm_90) -------------------------------------------------------------
__device__ __forceinline__ void launch_dependents() {
#if HAS_SM90
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Returns when all earlier kernels of the stream have ended and their writes are visible.
__device__ __forceinline__ void wait_for_previous() {
#if HAS_SM90
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Adds, and returns the old value. What the thread has seen written (so, after a barrier, the whole block's writes) is
// visible to who sees the new value; later reads are not before it.
__device__ __forceinline__ uint32_t atomic_add_ordered(uint32_t* p, uint32_t value) {
    uint32_t old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(value) : "memory");
    return old;
}

// Until wait_for_previous, this thread reads what an earlier kernel may still be writing: it must check again afterwards. For
// the emulator, which takes such reads for errors.
__device__ __forceinline__ void speculate() {}

// ---- asynchronous copies, sm_80 --------------------------------------------------------------------------------------
// 16 bytes global -> shared; bytes beyond `valid` (0..16) are zero and not read.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, int valid = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// ---- tensor cores, sm_80 ---------------------------------------------------------------------------------------------
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared) : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(shared) : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared) : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(shared) : "memory");
}
// d (16 x 8 fp32) += a (16 x 16 bf16, row-major) * b (16 x 8 bf16, column-major). Lane l: g = l/4, q = l%4; d[0..1] = row g,
// columns 2q, 2q+1; d[2..3] = row g + 8.
__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Barrier `id` (1..15; 0 is __syncthreads) among `threads` threads of the block.
__device__ __forceinline__ void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Counts as the arrivals of these threads at barrier `id`, without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

#if HAS_SM90
// ---- mbarriers and bulk copies, sm_90 --------------------------------------------------------------------------------
__device__ __forceinline__ void mbarrier_init(uint64_t* bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
// One arrival, and `bytes` more that copies must deliver before the phase ends.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
// More bytes for the current phase, without an arrival.
__device__ __forceinline__ void mbarrier_expect(uint64_t* bar, int bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
// Returns when the phase with parity `parity` (0, 1, 0 ...) has ended.
__device__ __forceinline__ void mbarrier_wait(uint64_t* bar, int parity) {
    asm volatile("{\n.reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}"
                 ::"r"(shared_address(bar)), "r"(parity) : "memory");
}
// Whether that phase has ended; may wait a little first.
__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* bar, int parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");
    return done != 0;
}
// The same without waiting.
__device__ __forceinline__ bool mbarrier_test_wait(uint64_t* bar, int parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");
    return done != 0;
}
// `bytes` (a multiple of 16, both addresses 16-byte aligned) global -> shared; completes on `bar`. One thread.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, int bytes, uint64_t* bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(bar)) : "memory");
}
// The same, for data that is read once: evicted from L2 first.
__device__ __forceinline__ void bulk_copy_once(void* shared, const void* global, int bytes, uint64_t* bar) {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(bar)), "l"(policy) : "memory");
}
__device__ __forceinline__ void bulk_prefetch_l2(const void* global, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}
// A box of a 2-D tensor map (column `x`, row `y` of its first element) -> shared; completes on `bar`. One thread. What lies
// outside the tensor arrives as zeros and counts as bytes.
__device__ __forceinline__ void tma_load_2d(void* shared, const TensorMap* map, int x, int y, uint64_t* bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(shared_address(shared)), "l"(map), "r"(x), "r"(y), "r"(shared_address(bar)) : "memory");
}
__device__ __forceinline__ void tma_prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// The same into every block of the cluster whose bit is set in `blocks`, at the same shared offset; completes on each
// one's own barrier at that offset.
__device__ __forceinline__ void tma_load_2d_multicast(void* shared, const TensorMap* map, int x, int y, uint64_t* bar, uint32_t blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(shared_address(shared)), "l"(map), "r"(x), "r"(y), "r"(shared_address(bar)), "h"((uint16_t)blocks) : "memory");
}
// Whole 2 KB tiles of a weight matrix behind a tile map (launch.py:TileMap): those at `k_tile` of the map's box of row tiles
// from `row_tile` on, one after the other -> shared; completes on `bar`. One thread. Beyond the matrix: zeros.
__device__ __forceinline__ void tma_load_tiles(void* shared, const TensorMap* map, int k_tile, int row_tile, uint64_t* bar) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(shared_address(shared)), "l"(map), "r"(0), "r"(k_tile), "r"(row_tile), "r"(shared_address(bar)) : "memory");
}
__device__ __forceinline__ void tma_load_tiles_multicast(void* shared, const TensorMap* map, int k_tile, int row_tile, uint64_t* bar, uint32_t blocks) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;"
                 ::"r"(shared_address(shared)), "l"(map), "r"(0), "r"(k_tile), "r"(row_tile), "r"(shared_address(bar)), "h"((uint16_t)blocks) : "memory");
}
// Ordinary writes to shared memory before, asynchronous reads (wgmma, bulk copies) after.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Shared -> a box of a 2-D tensor map; what lies outside the tensor is not written. One thread; then bulk_commit, and
// bulk_wait_read before the shared memory is written again.
__device__ __forceinline__ void tma_store_2d(const TensorMap* map, int x, int y, const void* shared) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(map), "r"(x), "r"(y), "r"(shared_address(shared)) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// At most PENDING of this thread's committed groups may still read shared memory.
template <int PENDING> __device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }

// ---- clusters, sm_90 -------------------------------------------------------------------------------------------------
__device__ __forceinline__ uint32_t cluster_rank() { uint32_t rank; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank)); return rank; }
__device__ __forceinline__ void cluster_sync() {  // all threads of the cluster's blocks
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// The same barrier in two halves, for all threads of a warp together: each arrive is followed by a wait. Orders no memory
// but the set-up of mbarriers before mbarrier_fence_init.
__device__ __forceinline__ uint32_t cluster_size() { uint32_t size; asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size)); return size; }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// An arrival at the barrier that stands at `bar`'s place in block `rank` of the cluster. Says that we have read what may
// now be overwritten (.release.cluster would cost a MEMBAR.GPU each time and add nothing).
__device__ __forceinline__ void mbarrier_arrive_remote(uint64_t* bar, uint32_t rank) {
    asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [remote];\n}"
                 ::"r"(shared_address(bar)), "r"(rank) : "memory");
}
// bulk_copy into the same place of every block of the cluster in `mask`; completes on each one's own `bar`.
__device__ __forceinline__ void bulk_copy_multicast(void* shared, const void* global, int bytes, uint64_t* bar, uint16_t mask) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 ::"r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(bar)), "h"(mask) : "memory");
}
#endif

#if HAS_WGMMA
// ---- wgmma, sm_90a ---------------------------------------------------------------------------------------------------
// Descriptor of a K-major operand in 128-byte swizzle: rows of 64 bf16, atoms of 8 rows 1024 bytes apart, base 1024-byte
// aligned (the next 16 columns: + 32 bytes on the address). PTX ISA, "Matrix descriptor format".
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t shared) {
    return (uint64_t)((shared & 0x3FFFF) >> 4) | ((uint64_t)1 << 16) | ((uint64_t)(1024 >> 4) << 32) | ((uint64_t)1 << 62);
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
// The same; `d` are accumulators that may be read after it, not before.
template <int PENDING, int N> __device__ __forceinline__ void wgmma_wait(float (&d)[N]) {
    wgmma_wait<PENDING>();
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int REGISTERS> __device__ __forceinline__ void registers_raise() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS> __device__ __forceinline__ void registers_lower() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
#endif

}  // namespace ptx

#if HAS_WGMMA
#include "wgmma.cuh"  // ptx::wgmma<N>(float (&d)[N / 2], descriptor_a, descriptor_b, accumulate): one m64nNk16, generated
#endif
#endif
