// Shared by runtime.cpp and asynchronous.cpp only.
#pragma once
#include "context.h"
#include "runtime.h"

namespace emulator {

constexpr uint32_t MAX_THREADS = 1024;

enum Order : uint32_t { ORDER_FORWARD, ORDER_REVERSE, ORDER_SHUFFLED };
// When asynchronous copies and wgmma happen: when somebody waits for them (or, bulk copies, when nobody can run), at
// once, or at some moment between.
enum Delivery : uint32_t { DELIVER_LATE, DELIVER_EARLY, DELIVER_RANDOM };

struct Launch {  // executor.py packs it
    void (*invoke)(void** arguments);
    void** arguments;
    uint32_t grid[3], block[3];
    uint32_t shared_bytes;
    Order order;
    Delivery delivery;
    uint32_t num_multiprocessors;
    uint64_t seed;
};

struct PendingCopy {  // a cp.async
    uint8_t* shared;
    const void* global;
    uint32_t valid, group;
};

struct Fiber : Thread {
    Context context;
    uint8_t* stack;
    bool exited;
    Wait wait;
    const char* file;  // where it waits
    int line;
    Fiber* next;  // in the list of a barrier
    int barrier, barrier_threads;
    uint32_t barrier_result;
    uint64_t* mbarrier;
    int parity;
    PendingCopy* copies;
    uint32_t num_copies, copies_capacity, copy_groups;
    uint32_t wgmma_groups;  // committed
};

extern Launch launch;
extern Fiber* fibers;
inline Fiber* current_fiber() { return static_cast<Fiber*>(current); }

uint32_t random_below(uint32_t limit);
void wake(Fiber* fiber);
void wait_here(Wait kind, const char* file, int line);

// ---- asynchronous.cpp
bool deliver_one();   // a bulk copy in flight, if any
void deliver_some();  // with random delivery, perhaps
void reset_asynchronous();
void check_exit(Fiber* fiber);
const char* asynchronous_trouble();  // at the end of a block
void mbarrier_describe(uint64_t* bar, char* out, size_t size);

}  // namespace emulator
