// Shared by the runtime's own files only.
#pragma once
#include "context.h"
#include "runtime.h"

namespace emulator {

constexpr uint32_t MAX_THREADS = 1024;  // of a block
constexpr uint32_t MAX_CLUSTER = 16;    // blocks

enum Order : uint32_t { ORDER_FORWARD, ORDER_REVERSE, ORDER_SHUFFLED };
// When asynchronous copies and wgmma happen: when somebody waits for them (or, bulk copies, when nobody can run), at
// once, or at some moment between.
enum Delivery : uint32_t { DELIVER_LATE, DELIVER_EARLY, DELIVER_RANDOM };

struct Region {  // of device memory, whole pages; executor.py packs it
    uint8_t* start;
    uint64_t bytes;
    uint32_t written;      // by launches that may still run
    uint32_t written_now;  // by this one
};

struct Launch {  // executor.py packs it
    void (*invoke)(void** arguments);
    void** arguments;
    uint32_t grid[3], block[3];
    uint32_t shared_bytes, cluster;
    Order order;
    Delivery delivery;
    uint32_t num_multiprocessors, dependent;
    uint64_t seed;
    Region* regions;
    uint32_t num_regions;
    uint32_t begins_late;  // out: the next launch cannot begin before the one before this has ended
    // Of each block of a cluster; one set for all libraries of the process, because a guard below each stack costs two of
    // the process's limited number of mappings.
    uint8_t** stacks;
};

struct Barrier {
    uint32_t expected, arrived, predicates;  // expected 0: all that have not returned
    Fiber* waiting;
};

// A block of the cluster that runs. Its threads are fibers[rank * MAX_THREADS ...].
struct BlockState : Block {
    uint32_t num_live;
    bool lets_next_begin;  // has called launch_dependents
    Fiber* fibers;
    uint8_t* dynamic;  // ends at an unreadable page
    uint8_t* statics;  // its static arrays while another block of the cluster has the thread-local ones
    Warp warps[MAX_THREADS / 32];
    Barrier barriers[16];
};

struct PendingCopy {  // a cp.async, or a store of a box by TMA (then `map`)
    uint8_t* shared;
    const void* global;
    const TensorMap* map;
    int x, y;
    uint32_t valid, group;
};

struct CopyQueue {  // of one thread; groups are numbered by commits
    PendingCopy* copies;
    uint32_t count, capacity, groups;
    void push(PendingCopy copy);
    template <class Perform> void complete(int pending, Perform perform) {  // all but the `pending` newest groups
        uint32_t done = 0;
        while (done < count && (int64_t)copies[done].group < (int64_t)groups - pending) perform(copies[done++]);
        count -= done;
        for (uint32_t i = 0; i < count; i++) copies[i] = copies[done + i];
    }
};

struct Fiber : Thread {
    Context context;
    uint8_t* stack;
    bool exited, speculates;
    Wait wait;
    const char* file;  // where it waits
    int line;
    Fiber* next;  // in the list of a barrier
    int barrier, barrier_threads;
    uint32_t barrier_result;
    uint32_t mbarrier;  // shared address
    int parity;
    uint32_t cluster_arrivals;
    CopyQueue loads, stores;
    uint32_t wgmma_groups;  // committed
    bool wgmma_fenced;      // since its registers were last its own
};

extern Launch launch;
extern Fiber* fibers;
extern BlockState* blocks;  // of the cluster

inline Fiber* current_fiber() { return static_cast<Fiber*>(current); }
inline BlockState* block_of(const Fiber* fiber) { return static_cast<BlockState*>(fiber->block); }
inline BlockState* current_block() { return block_of(current_fiber()); }
inline uint32_t number_of(const Fiber* fiber) { return (uint32_t)(fiber - fibers); }

// ---- runtime.cpp
uint32_t random_below(uint32_t limit);
void wake(Fiber* fiber);
void wait_here(Wait kind, const char* file, int line);
uint32_t cluster_live();
bool happens_now();  // what is asynchronous, by Launch::delivery

// ---- memory.cpp
void prepare_memory();  // before a launch
const char* memory_trouble();  // after a cluster
void poison_shared();
void load_statics(BlockState* block);
uint8_t* shared_pointer_of(BlockState* block, uint32_t address, uint32_t bytes, uint32_t alignment);
void catch_faults(bool on);
uint32_t static_shared_bytes();
constexpr size_t STACK_BYTES = 64 << 10;

// ---- report.cpp
extern bool failed;
extern char message[8192];
[[noreturn]] void deadlock();
const char* name_of(Wait wait);
void leave_fibers();  // back to emulator_run, for good

// ---- asynchronous.cpp
bool deliver_one();   // a bulk copy in flight, if any
void deliver_some();  // with random delivery, perhaps
void reset_copies();
void check_copies_of(Fiber* fiber);   // that returns
const char* copies_trouble();  // after a cluster
void mbarrier_describe(const Fiber& waiter, char* out, size_t size);

// ---- dependent.cpp
void begin_dependent_launch();
void begin_dependent_cluster();
bool previous_ends();  // true: threads waited for it, and go on
void allow_speculation(bool on);
void touch_source(const void* global, uint32_t bytes);
bool fault_in_region(uintptr_t address);
const char* end_dependent_launch();

// ---- tensor_cores.cpp
void reset_tensor_cores();
void check_wgmma_of(Fiber* fiber);

}  // namespace emulator
