// Launches that begin while the one before them runs (programmatic dependent launch), on memory that Python registered.
//
// Before ptx::wait_for_previous a thread must not touch what launches write that may still run, nor write anything (such a
// launch may still read it). So each cluster first runs as far as it can with that memory protected; threads in
// wait_for_previous go on when no other can. Which launch writes what is seen by the same means: memory is read-only until
// the first write.
//
// Which launches may still run: the one before; and, if each of its blocks let us begin before it waited itself, also those
// that could still run when it began (executor.py keeps this account).
#include "internal.h"

#include <stdio.h>
#include <sys/mman.h>

namespace emulator {

namespace {

constexpr uint32_t GUARDED_CLUSTERS = 16;  // of a launch; protecting memory takes system calls

bool guarding, anybody_waited;
uint32_t num_guarded, num_speculating;
Fiber* waiting;

void protect(const Region& region, int access) { mprotect(region.start, region.bytes, access); }

bool dependent() { return launch.dependent != 0; }

void protect_written(int access) {
    for (uint32_t i = 0; i < launch.num_regions; i++)
        if (launch.regions[i].written) protect(launch.regions[i], access);
}

}  // namespace

void begin_dependent_launch() {
    guarding = anybody_waited = false;
    num_guarded = 0;
    launch.begins_late = 0;
    for (uint32_t i = 0; i < launch.num_regions; i++) {
        launch.regions[i].written_now = 0;
        protect(launch.regions[i], PROT_READ);
    }
}

void begin_dependent_cluster() {
    waiting = nullptr;
    num_speculating = 0;
    guarding = dependent() && num_guarded++ < GUARDED_CLUSTERS;
    if (!guarding) return;
    for (uint32_t i = 0; i < launch.num_regions; i++) protect(launch.regions[i], launch.regions[i].written ? PROT_NONE : PROT_READ);
}

bool previous_ends() {
    if (!guarding) return false;
    guarding = false;
    protect_written(PROT_READ);
    for (uint32_t rank = 0; rank < launch.cluster; rank++)
        if (!blocks[rank].lets_next_begin && blocks[rank].num_live != 0) launch.begins_late = 1;
    bool any = waiting != nullptr;
    for (Fiber* fiber = waiting; fiber != nullptr; fiber = fiber->next) wake(fiber);
    waiting = nullptr;
    return any;
}

void allow_speculation(bool on) {  // by one thread or copy
    if (!guarding) return;
    if (on && num_speculating++ == 0) protect_written(PROT_READ);
    if (!on && --num_speculating == 0) protect_written(PROT_NONE);
}

void wait_for_previous(const char* file, int line) {
    anybody_waited = true;
    if (!guarding) return;
    Fiber* fiber = current_fiber();
    if (fiber->speculates) {
        fiber->speculates = false;
        allow_speculation(false);
    }
    fiber->next = waiting;
    waiting = fiber;
    wait_here(WAIT_PREVIOUS, file, line);
}

void launch_dependents() { current_block()->lets_next_begin = true; }

void speculate() {
    if (!guarding || current_fiber()->speculates) return;
    current_fiber()->speculates = true;
    allow_speculation(true);
}

// An asynchronous copy may read its source from now on.
void touch_source(const void* global, uint32_t bytes) {
    if (!guarding || bytes == 0) return;
    (void)*(const volatile uint8_t*)global;
    (void)*((const volatile uint8_t*)global + bytes - 1);
}

// A fault at `address`: true if the access may be done again.
bool fault_in_region(uintptr_t address) {
    for (uint32_t i = 0; i < launch.num_regions; i++) {
        Region& region = launch.regions[i];
        if (address - (uintptr_t)region.start >= region.bytes) continue;
        if (guarding && region.written) fail("before ptx::wait_for_previous: reads or writes 0x%zx, in memory that an earlier launch writes", address);
        if (guarding) fail("before ptx::wait_for_previous: writes 0x%zx, which an earlier launch may still read", address);
        region.written_now = 1;
        protect(region, PROT_READ | PROT_WRITE);
        return true;
    }
    return false;
}

const char* end_dependent_launch() {
    guarding = false;
    for (uint32_t i = 0; i < launch.num_regions; i++) protect(launch.regions[i], PROT_READ | PROT_WRITE);
    return dependent() && !anybody_waited ? "is launched as dependent, but no thread calls ptx::wait_for_previous" : nullptr;
}

}  // namespace emulator
