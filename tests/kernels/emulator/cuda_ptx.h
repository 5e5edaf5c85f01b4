// The functions of kernels/ptx.cuh. -DEMULATOR_HOPPER=1 is an sm_90a, 0 an sm_80. Included by cuda_emulator.h.
#pragma once
#include <time.h>

#define HAS_SM90 EMULATOR_HOPPER
#define HAS_WGMMA EMULATOR_HOPPER

using TensorMap = emulator::TensorMap;

namespace ptx {

inline uint32_t sm_id() { return emulator::current->block->sm; }
inline uint64_t global_timer() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
inline uint32_t shared_address(const void* p) { return emulator::shared_address(p); }
inline void launch_dependents() { emulator::launch_dependents(); }
inline void speculate() { emulator::speculate(); }
inline void wait_for_previous(EMULATOR_SITE) { emulator::wait_for_previous(file, line); }

// ---- asynchronous copies, sm_80
inline void cp_async_16(uint32_t shared, const void* global, int valid = 16) { emulator::cp_async(shared, global, valid); }
inline void cp_async_commit() { emulator::cp_async_commit(); }
template <int PENDING> inline void cp_async_wait() { emulator::cp_async_wait(PENDING); }

// ---- tensor cores, sm_80
template <int MATRICES, bool TRANSPOSED>
inline void emulator_ldmatrix(uint32_t* r, uint32_t shared, const char* file, int line) {
    struct Operand {
        uint32_t* r;
        uint32_t address;
    } operand = {r, shared};
    emulator::warp_collective(emulator::WAIT_LDMATRIX, 0xFFFFFFFF, operand, file, line, [](Operand** lanes) {
        for (int i = 0; i < MATRICES; i++) {
            const uint16_t* row[8];
            for (int j = 0; j < 8; j++) row[j] = (const uint16_t*)emulator::shared_pointer(lanes[8 * i + j]->address, 16, 16);
            for (int lane = 0; lane < 32; lane++) {
                int g = lane / 4, q = lane % 4;
                if (TRANSPOSED) lanes[lane]->r[i] = row[2 * q][g] | (uint32_t)row[2 * q + 1][g] << 16;
                else memcpy(&lanes[lane]->r[i], row[g] + 2 * q, 4);
            }
        }
    });
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared, EMULATOR_SITE) { emulator_ldmatrix<4, false>(r, shared, file, line); }
inline void ldmatrix_x2(uint32_t (&r)[2], uint32_t shared, EMULATOR_SITE) { emulator_ldmatrix<2, false>(r, shared, file, line); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t shared, EMULATOR_SITE) { emulator_ldmatrix<4, true>(r, shared, file, line); }
inline void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t shared, EMULATOR_SITE) { emulator_ldmatrix<2, true>(r, shared, file, line); }
inline void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMULATOR_SITE) {
    emulator::MmaOperand operand = {d, a, b0, b1};
    emulator::warp_collective(emulator::WAIT_MMA, 0xFFFFFFFF, operand, file, line, emulator::mma_16816);
}

inline uint32_t atomic_add_ordered(uint32_t* p, uint32_t value) { return atomicAdd(p, value); }
inline void named_barrier(int id, int threads, EMULATOR_SITE) { emulator::barrier_sync(id, threads, false, file, line); }
inline void named_barrier_arrive(int id, int threads) { emulator::barrier_arrive_only(id, threads); }

#if HAS_SM90
// ---- mbarriers and bulk copies, sm_90
inline void mbarrier_init(uint64_t* bar, int arrivals) { emulator::mbarrier_init(bar, arrivals); }
inline void mbarrier_fence_init() {}
inline void mbarrier_arrive(uint64_t* bar) { emulator::mbarrier_arrive(bar, 1, 0); }
inline void mbarrier_arrive_expect(uint64_t* bar, int bytes) { emulator::mbarrier_arrive(bar, 1, bytes); }
inline void mbarrier_expect(uint64_t* bar, int bytes) { emulator::mbarrier_arrive(bar, 0, bytes); }
inline void mbarrier_wait(uint64_t* bar, int parity, EMULATOR_SITE) { emulator::mbarrier_wait(bar, parity, file, line); }
inline bool mbarrier_test_wait(uint64_t* bar, int parity) { return emulator::mbarrier_done(bar, parity); }
inline bool mbarrier_try_wait(uint64_t* bar, int parity) {
    if (!emulator::mbarrier_done(bar, parity)) emulator::yield();
    return emulator::mbarrier_done(bar, parity);
}
inline void bulk_copy(void* shared, const void* global, int bytes, uint64_t* bar) { emulator::bulk_copy(shared, global, bytes, bar); }
inline void bulk_copy_once(void* shared, const void* global, int bytes, uint64_t* bar) { emulator::bulk_copy(shared, global, bytes, bar); }
inline void bulk_prefetch_l2(const void* global, int bytes) {
    if (bytes % 16 || (uintptr_t)global % 16) emulator::fail("bulk_prefetch_l2 of %d bytes at %p: not aligned to 16", bytes, global);
}
inline void tma_load_2d(void* shared, const TensorMap* map, int x, int y, uint64_t* bar) { emulator::tma_load_2d(shared, map, x, y, bar); }
inline void tma_prefetch_map(const TensorMap*) {}
inline void tma_store_2d(const TensorMap* map, int x, int y, const void* shared) { emulator::tma_store_2d(map, x, y, shared); }
inline void bulk_commit() { emulator::bulk_commit(); }
template <int PENDING> inline void bulk_wait_read() { emulator::bulk_wait(PENDING); }

// ---- clusters, sm_90
inline uint32_t cluster_rank() { return emulator::current->block->cluster_rank; }
inline uint32_t cluster_size() { return emulator::current->block->cluster_size; }
inline void cluster_arrive() { emulator::cluster_arrive(); }
inline void cluster_wait(EMULATOR_SITE) { emulator::cluster_wait(file, line); }
inline void cluster_sync(EMULATOR_SITE) {
    emulator::cluster_arrive();
    emulator::cluster_wait(file, line);
}
inline void mbarrier_arrive_remote(uint64_t* bar, uint32_t rank) { emulator::mbarrier_arrive(bar, 1, 0, rank); }
inline void bulk_copy_multicast(void* shared, const void* global, int bytes, uint64_t* bar, uint32_t ranks) {
    emulator::bulk_copy(shared, global, bytes, bar, ranks);
}
inline void tma_load_2d_multicast(void* shared, const TensorMap* map, int x, int y, uint64_t* bar, uint32_t ranks) {
    emulator::tma_load_2d(shared, map, x, y, bar, ranks);
}
inline void tma_load_tiles(void* shared, const TensorMap* map, int k_tile, int row_tile, uint64_t* bar) {
    emulator::tma_load_tiles(shared, map, k_tile, row_tile, bar);
}
inline void tma_load_tiles_multicast(void* shared, const TensorMap* map, int k_tile, int row_tile, uint64_t* bar, uint32_t ranks) {
    emulator::tma_load_tiles(shared, map, k_tile, row_tile, bar, ranks);
}
inline void fence_async_shared() {}
#endif

#if HAS_WGMMA
// ---- wgmma, sm_90a
inline uint64_t wgmma_descriptor(uint32_t shared) {
    return (uint64_t)((shared & 0x3FFFF) >> 4) | ((uint64_t)1 << 16) | ((uint64_t)(1024 >> 4) << 32) | ((uint64_t)1 << 62);
}
inline void wgmma_fence() { emulator::wgmma_fence(); }
inline void wgmma_commit() { emulator::wgmma_commit(); }
template <int PENDING> inline void wgmma_wait() { emulator::wgmma_wait(PENDING); }
template <int PENDING, int N> inline void wgmma_wait(float (&)[N]) { emulator::wgmma_wait(PENDING); }
template <int REGISTERS> inline void registers_raise() {}
template <int REGISTERS> inline void registers_lower() {}
template <int N> inline void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate, EMULATOR_SITE) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256);
    emulator::wgmma(N, d, nullptr, a, b, accumulate != 0, file, line);
}
// A from registers in the layout of mma_16816 (warp w of the warpgroup: rows 16w..16w+15), B N-major.
template <int N> inline void wgmma_transposed(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate, EMULATOR_SITE) {
    static_assert(N == 64);
    emulator::wgmma(N, d, a, 0, b, accumulate != 0, file, line, true);
}
#endif

}  // namespace ptx
