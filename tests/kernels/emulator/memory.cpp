// Shared memory, stacks, and faults.
//
// Shared addresses: static arrays from 0, then, at the next multiple of 1024, the dynamic ones, as nvcc lays them out.
// Static arrays are this library's thread-local storage. Blocks of a cluster take turns in it: load_statics.
#include "internal.h"

#include <link.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

namespace emulator {

Fiber* fibers;
BlockState* blocks;

namespace {

constexpr size_t GUARD = 64 << 10;                    // a multiple of any page size
constexpr size_t STACK_STRIDE = STACK_BYTES + GUARD;  // the guard lies below
constexpr uint32_t REGION = 256 << 10;                // for one block's dynamic shared memory
constexpr uint8_t POISON = 0xFF;                      // NaN as bf16, fp16 and fp32, -1 as an integer
constexpr uint8_t CANARY = 0xA5;

uint8_t* statics;
uint32_t static_bytes, static_rounded, dynamic_rounded;
BlockState* loaded;
uint8_t* regions[MAX_CLUSTER];
constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE};
struct sigaction old_actions[3];
stack_t old_stack;

uint8_t touch_thread_local() {  // makes the loader allocate this library's thread-local storage
    static thread_local volatile uint8_t anchor;
    return anchor;
}

int find_thread_local(dl_phdr_info* info, size_t, void*) {
    uintptr_t self = (uintptr_t)&find_thread_local;
    bool ours = false;
    uint32_t bytes = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr)& segment = info->dlpi_phdr[i];
        uintptr_t base = info->dlpi_addr + segment.p_vaddr;
        ours = ours || (segment.p_type == PT_LOAD && self >= base && self < base + segment.p_memsz);
        if (segment.p_type == PT_TLS) bytes = (uint32_t)segment.p_memsz;
    }
    if (!ours) return 0;
    statics = (uint8_t*)info->dlpi_tls_data;
    static_bytes = bytes;
    return 1;
}

uint8_t* reserve(size_t bytes) {
    void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) {
        perror("emulator: mmap");
        abort();
    }
    return (uint8_t*)found;
}

void guard(uint8_t* at) {
    if (mprotect(at, GUARD, PROT_NONE) == 0) return;
    perror("emulator: mprotect");
    abort();
}

void prepare_rank(uint32_t rank) {
    BlockState& block = blocks[rank];
    if (launch.stacks[rank] == nullptr) {
        launch.stacks[rank] = reserve(MAX_THREADS * STACK_STRIDE);
        for (uint32_t i = 0; i < MAX_THREADS; i++) guard(launch.stacks[rank] + i * STACK_STRIDE);
    }
    if (regions[rank] == nullptr) {
        regions[rank] = reserve(REGION + GUARD);
        guard(regions[rank] + REGION);
        block.fibers = fibers + rank * MAX_THREADS;
        for (uint32_t i = 0; i < MAX_THREADS; i++) block.fibers[i].stack = launch.stacks[rank] + i * STACK_STRIDE + GUARD;
    }
    block.dynamic = regions[rank] + REGION - dynamic_rounded;
    block.statics = (uint8_t*)realloc(block.statics, static_rounded);
    memset(block.dynamic + launch.shared_bytes, CANARY, dynamic_rounded - launch.shared_bytes);
}

void handle_fault(int signal_number, siginfo_t* info, void*) {
    sigset_t set;  // fail does not come back here
    sigemptyset(&set);
    sigaddset(&set, signal_number);
    sigprocmask(SIG_UNBLOCK, &set, nullptr);
    if (signal_number == SIGSEGV && fault_in_region((uintptr_t)info->si_addr)) return;
    if (signal_number == SIGFPE) fail("integer division by zero, or its result does not fit");
    uintptr_t address = (uintptr_t)info->si_addr;
    for (uint32_t rank = 0; rank < launch.cluster; rank++) {
        uintptr_t end = (uintptr_t)regions[rank] + REGION, stack = (uintptr_t)launch.stacks[rank];
        if (address >= end && address < end + GUARD)
            fail("access past the end of dynamic shared memory: byte %zu of %u", address - (uintptr_t)blocks[rank].dynamic, launch.shared_bytes);
        if (address >= stack && address < stack + MAX_THREADS * STACK_STRIDE)
            fail("stack overflow: more than about %zu bytes of local variables", STACK_BYTES);
    }
    fail("illegal memory access at 0x%zx (signal %d)", address, signal_number);
}

}  // namespace

uint32_t static_shared_bytes() { return static_bytes; }

void prepare_memory() {
    (void)touch_thread_local();
    dl_iterate_phdr(find_thread_local, nullptr);
    static_rounded = (static_bytes + 1023) & ~1023u;
    dynamic_rounded = (launch.shared_bytes + 1023) & ~1023u;
    if (fibers == nullptr) {
        fibers = (Fiber*)reserve(MAX_CLUSTER * MAX_THREADS * sizeof(Fiber));
        blocks = (BlockState*)reserve(MAX_CLUSTER * sizeof(BlockState));
    }
    for (uint32_t rank = 0; rank < launch.cluster; rank++) prepare_rank(rank);
}

void poison_shared() {
    loaded = &blocks[0];
    memset(statics, POISON, static_bytes);
    for (uint32_t rank = 0; rank < launch.cluster; rank++) {
        memset(blocks[rank].statics, POISON, static_bytes);
        memset(blocks[rank].dynamic, POISON, launch.shared_bytes);
    }
}

void load_statics(BlockState* block) {
    if (block == loaded) return;
    memcpy(loaded->statics, statics, static_bytes);
    memcpy(statics, block->statics, static_bytes);
    loaded = block;
}

const char* memory_trouble() {
    static char text[128];
    for (uint32_t rank = 0; rank < launch.cluster; rank++)
        for (uint32_t i = launch.shared_bytes; i < dynamic_rounded; i++)
            if (blocks[rank].dynamic[i] != CANARY) {
                snprintf(text, sizeof text, "wrote past the end of dynamic shared memory: byte %u of %u", i, launch.shared_bytes);
                memset(blocks[rank].dynamic + launch.shared_bytes, CANARY, dynamic_rounded - launch.shared_bytes);
                return text;
            }
    return nullptr;
}

uint8_t* dynamic_shared() { return current_block()->dynamic; }

uint32_t shared_address(const void* pointer) {
    const uint8_t *p = (const uint8_t*)pointer, *dynamic = current_block()->dynamic;
    if (p >= dynamic && p <= dynamic + launch.shared_bytes) return (uint32_t)(p - dynamic) + static_rounded;
    if (p >= statics && p <= statics + static_bytes) return (uint32_t)(p - statics);
    fail("%p is not an address in shared memory", pointer);
}

uint8_t* shared_pointer_of(BlockState* block, uint32_t address, uint32_t bytes, uint32_t alignment) {
    if (address % alignment) fail("shared address %u is not aligned to %u bytes", address, alignment);
    if ((uint64_t)address + bytes <= static_bytes) return (block == loaded ? statics : block->statics) + address;
    if (address < static_rounded || (uint64_t)address + bytes > (uint64_t)static_rounded + launch.shared_bytes)
        fail("%u bytes at shared address %u are outside the block's shared memory (static %u, dynamic %u bytes)", bytes, address, static_bytes, launch.shared_bytes);
    return block->dynamic + (address - static_rounded);
}

uint8_t* shared_pointer(uint32_t address, uint32_t bytes, uint32_t alignment) {
    return shared_pointer_of(current_block(), address, bytes, alignment);
}

void catch_faults(bool on) {
    if (!on) {
        for (int i = 0; i < 3; i++) sigaction(FAULTS[i], &old_actions[i], nullptr);
        sigaltstack(&old_stack, nullptr);
        return;
    }
    static uint8_t* own_stack = (uint8_t*)malloc(64 << 10);
    stack_t own = {};
    own.ss_sp = own_stack;
    own.ss_size = 64 << 10;
    sigaltstack(&own, &old_stack);
    struct sigaction action = {};
    action.sa_sigaction = handle_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 3; i++) sigaction(FAULTS[i], &action, &old_actions[i]);
}

}  // namespace emulator
