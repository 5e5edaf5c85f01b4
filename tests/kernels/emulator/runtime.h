// What emulated code asks of the runtime (the .cpp files here): fibers, rendezvous, shared memory, errors.
//
// Every thread of a block is a fiber; all fibers share one OS thread and run until they must wait for others. Blocks run
// one after another. So nothing here is atomic, and a kernel whose blocks wait for each other does not work.
#pragma once
#include <stddef.h>
#include <stdint.h>

// Where the kernel called us, for reports; the default arguments are evaluated at the call.
#define EMULATOR_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

struct uint3 {
    unsigned x, y, z;
};

namespace emulator {

enum Wait : uint8_t {
    WAIT_NONE, WAIT_SYNCWARP, WAIT_SHUFFLE, WAIT_VOTE, WAIT_MATCH, WAIT_REDUCE, WAIT_LDMATRIX, WAIT_MMA, WAIT_BARRIER,
    WAIT_MBARRIER, WAIT_CLUSTER, WAIT_WGMMA, WAIT_PREVIOUS,
};

struct Warp {
    struct Meeting {  // lanes that wait for the rest of `mask`
        uint32_t mask, arrived;
        Wait kind;
    };
    uint32_t lanes;   // that exist
    uint32_t exited;  // that have returned
    int meetings;
    Meeting meeting[32];
    void* operands[32];  // of the lanes that wait; on their stacks
};

struct Fiber;  // internal.h

struct Block {
    uint3 index, size, grid;
    uint32_t linear, sm, cluster_rank, cluster_size;
};

// The part of a fiber that inline code reads.
struct Thread {
    uint3 index;  // threadIdx
    uint32_t linear, lane;
    Warp* warp;
    Block* block;
};

extern Thread* current;

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// The calling lane arrives. True: it is the last of `mask`, computes for all and then calls warp_release. False: another
// lane has done so.
bool warp_arrive(Wait kind, uint32_t mask, void* operand, const char* file, int line);
void warp_release(uint32_t mask);

template <class Operand, class Compute>
inline void warp_collective(Wait kind, uint32_t mask, Operand& operand, const char* file, int line, Compute compute) {
    if (warp_arrive(kind, mask, &operand, file, line)) {
        compute(reinterpret_cast<Operand**>(current->warp->operands));
        warp_release(mask);
    }
}

// Barrier `id` among `threads` threads; 0 threads: all that have not returned. Returns the number of threads that came
// with a true predicate.
uint32_t barrier_sync(int id, int threads, bool predicate, const char* file, int line);
void barrier_arrive_only(int id, int threads);
void yield();  // to any fiber that can run

void cluster_arrive();
void cluster_wait(const char* file, int line);


// ---- dependent.cpp
void launch_dependents();
void wait_for_previous(const char* file, int line);
void speculate();

// ---- memory.cpp
uint8_t* dynamic_shared();
uint32_t shared_address(const void* pointer);  // offset in the block's shared memory: static arrays first
uint8_t* shared_pointer(uint32_t address, uint32_t bytes, uint32_t alignment);  // fails outside shared memory

// ---- asynchronous.cpp
void cp_async(uint32_t shared, const void* global, int valid);
void cp_async_commit();
void cp_async_wait(int pending);

// The mbarrier at `bar`'s place in block `rank` of the cluster, by default the calling thread's own block.
constexpr uint32_t OWN_RANK = UINT32_MAX;
void mbarrier_init(uint64_t* bar, int arrivals);
void mbarrier_arrive(uint64_t* bar, int arrivals, int expect_bytes, uint32_t rank = OWN_RANK);
bool mbarrier_done(uint64_t* bar, int parity);
void mbarrier_wait(uint64_t* bar, int parity, const char* file, int line);

struct alignas(64) TensorMap {  // executor.py packs it
    uint64_t address;
    int64_t rows, columns, row_bytes;
    int32_t box_rows;
    int32_t tiles;  // 1: rows, columns and box_rows count whole tiles of 2 KB
    int32_t pad[20];
};
static_assert(sizeof(TensorMap) == 128);
// Into the same place of every block of the cluster whose bit is set in `ranks`, 0: the own block only.
void bulk_copy(void* shared, const void* global, int bytes, uint64_t* bar, uint32_t ranks = 0);
void tma_load_2d(void* shared, const TensorMap* map, int x, int y, uint64_t* bar, uint32_t ranks = 0);
void tma_load_tiles(void* shared, const TensorMap* map, int k_tile, int row_tile, uint64_t* bar, uint32_t ranks = 0);
void tma_store_2d(const TensorMap* map, int x, int y, const void* shared);
void bulk_commit();
void bulk_wait(int pending);

// ---- tensor_cores.cpp
// d (m64 x n fp32) = a (m64k16 bf16) * b (k16 x n) + (accumulate ? d : 0); a_registers: null, or this thread's A fragment.
void wgmma(int n, float* d, const uint32_t* a_registers, uint64_t a, uint64_t b, bool accumulate, const char* file, int line, bool b_transposed = false);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);

struct MmaOperand {
    float* d;
    const uint32_t* a;
    uint32_t b0, b1;
};
void mma_16816(MmaOperand** lanes);

}  // namespace emulator
