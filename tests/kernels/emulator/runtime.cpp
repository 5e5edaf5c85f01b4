// Fibers, rendezvous of warps and blocks, shared memory, errors. See runtime.h.
#include "internal.h"

#include <link.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

EMULATOR_SWITCH_ASSEMBLY

namespace emulator {

Thread* current;
Block block;
Fiber* fibers;
Launch launch;

namespace {

constexpr size_t STACK_BYTES = 64 << 10;
constexpr size_t STACK_STRIDE = STACK_BYTES + 4096;  // a guard page below each
constexpr uint32_t SHARED_LIMIT = 227 << 10;         // of a block on sm_90
constexpr uint8_t POISON = 0xFF;                     // NaN as bf16, fp16 and fp32, -1 as an integer
constexpr uint8_t CANARY = 0xA5;

struct Barrier {
    uint32_t expected, arrived, predicates, result;
    Fiber* waiting;
};

Context main_context;
char message[8192];
bool failed;

uint16_t* ready;  // ring of fibers that can run
uint32_t ready_head, ready_count;
uint32_t num_threads, num_live;
uint32_t idle_yields;
uint64_t random_state;

Warp warps[MAX_THREADS / 32];
Barrier barriers[16];

uint8_t *shared_region, *shared_dynamic, *shared_static;
uint32_t static_bytes, static_rounded;

uint8_t static_anchor_storage() {  // makes the loader allocate this library's thread-local block
    static thread_local volatile uint8_t anchor;
    return anchor;
}

const char* name_of(Wait wait) {
    static const char* const names[] = {"nothing", "__syncwarp", "a shuffle", "a vote", "__match", "__reduce", "ldmatrix",
                                        "mma", "a barrier", "an mbarrier", "wgmma"};
    return names[wait];
}

[[noreturn]] void leave(const char* text) {
    snprintf(message, sizeof message, "%s", text);
    failed = true;
    Context lost;
    context_switch(&lost, &main_context);
    __builtin_unreachable();
}

// ---- what waits where, when nothing can go on

int describe_wait(const Fiber& fiber, char* out, size_t size) {
    if (fiber.wait == WAIT_NONE) return snprintf(out, size, "can run");
    const char* base = fiber.file ? strrchr(fiber.file, '/') : nullptr;
    base = base ? base + 1 : fiber.file;
    if (fiber.wait == WAIT_BARRIER) {
        const Barrier& barrier = barriers[fiber.barrier];
        const char* kind = fiber.barrier_threads ? "named_barrier" : "__syncthreads";
        return snprintf(out, size, "%s, barrier %d, %u of %u threads there (%s:%d)", kind, fiber.barrier, barrier.arrived,
                        fiber.barrier_threads ? barrier.expected : num_live, base, fiber.line);
    }
    if (fiber.wait == WAIT_MBARRIER) {
        char state[128];
        mbarrier_describe(fiber.mbarrier, state, sizeof state);
        return snprintf(out, size, "mbarrier_wait, mbarrier at shared address %u, parity %d; %s (%s:%d)",
                        shared_address(fiber.mbarrier), fiber.parity, state, base, fiber.line);
    }
    if (fiber.wait == WAIT_WGMMA) return snprintf(out, size, "wgmma of the warpgroup (%s:%d)", base, fiber.line);
    for (int i = 0; i < fiber.warp->meetings; i++) {
        const Warp::Meeting& meeting = fiber.warp->meeting[i];
        if (meeting.arrived >> fiber.lane & 1)
            return snprintf(out, size, "%s, mask %08x, lanes there %08x (%s:%d)", name_of(fiber.wait), meeting.mask,
                            meeting.arrived, base, fiber.line);
    }
    return snprintf(out, size, "%s (%s:%d)", name_of(fiber.wait), base, fiber.line);
}

[[noreturn]] void deadlock() {
    static char text[8000];
    int used = snprintf(text, sizeof text, "deadlock in block (%u, %u, %u): no thread can go on", block.index.x,
                        block.index.y, block.index.z);
    char line[512], next[512];
    for (uint32_t first = 0, i = 0; i <= num_threads && used < 7000; i++) {
        bool ended = i == num_threads || fibers[i].exited;
        if (ended) next[0] = 0;
        else describe_wait(fibers[i], next, sizeof next);
        if (i == 0 || strcmp(line, next)) {
            if (i > 0 && line[0])
                used += snprintf(text + used, sizeof text - used, "\n  threads %u-%u wait at %s", first, i - 1, line);
            first = i;
            strcpy(line, next);
        }
        if (i == num_threads && line[0])
            used += snprintf(text + used, sizeof text - used, "\n  threads %u-%u wait at %s", first, i - 1, line);
    }
    if (num_live < num_threads)
        snprintf(text + used, sizeof text - used, "\n  %u threads have returned", num_threads - num_live);
    leave(text);
}

// ---- scheduling

Fiber* next_ready() {
    while (ready_count == 0) {
        if (deliver_one()) continue;
        deadlock();
    }
    if (launch.order == ORDER_SHUFFLED) {
        uint32_t other = (ready_head + random_below(ready_count)) & (MAX_THREADS - 1);
        uint16_t chosen = ready[other];
        ready[other] = ready[ready_head];
        ready[ready_head] = chosen;
    }
    Fiber* fiber = &fibers[ready[ready_head]];
    ready_head = (ready_head + 1) & (MAX_THREADS - 1);
    ready_count--;
    return fiber;
}

void switch_away(Fiber* from) {
    deliver_some();
    Fiber* to = next_ready();
    if (to == from) return;
    current = to;
    context_switch(&from->context, &to->context);
}

void release_barrier(Barrier& barrier) {
    barrier.result = barrier.predicates;
    for (Fiber* fiber = barrier.waiting; fiber != nullptr; fiber = fiber->next) {
        fiber->barrier_result = barrier.predicates;
        wake(fiber);
    }
    barrier.waiting = nullptr;
    barrier.expected = barrier.arrived = barrier.predicates = 0;
}

void exit_fiber() {
    Fiber* fiber = current_fiber();
    Warp* warp = fiber->warp;
    for (int i = 0; i < warp->meetings; i++)
        if (warp->meeting[i].mask >> fiber->lane & 1)
            fail("returns while lanes %08x of its warp wait for it at %s (mask %08x)", warp->meeting[i].arrived,
                 name_of(warp->meeting[i].kind), warp->meeting[i].mask);
    check_exit(fiber);
    warp->exited |= 1u << fiber->lane;
    fiber->exited = true;
    num_live--;
    if (num_live == 0) {
        context_switch(&fiber->context, &main_context);
        __builtin_unreachable();
    }
    Barrier& barrier = barriers[0];  // those at __syncthreads no longer wait for this one
    if (barrier.waiting != nullptr && barrier.expected == 0 && barrier.arrived == num_live) release_barrier(barrier);
    switch_away(fiber);
    __builtin_unreachable();
}

void fiber_entry() {
    launch.invoke(launch.arguments);
    exit_fiber();
}

// ---- shared memory

int find_static(dl_phdr_info* info, size_t, void*) {
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr)& segment = info->dlpi_phdr[i];
        uintptr_t self = (uintptr_t)&find_static, base = info->dlpi_addr + segment.p_vaddr;
        if (segment.p_type != PT_LOAD || self < base || self >= base + segment.p_memsz) continue;
        for (int j = 0; j < info->dlpi_phnum; j++)
            if (info->dlpi_phdr[j].p_type == PT_TLS) static_bytes = (uint32_t)info->dlpi_phdr[j].p_memsz;
        shared_static = (uint8_t*)info->dlpi_tls_data;
        return 1;
    }
    return 0;
}

void poison_shared() {
    memset(shared_static, POISON, static_bytes);
    memset(shared_dynamic, POISON, launch.shared_bytes);
}

// ---- the OS side

void handle_fault(int signal_number, siginfo_t* info, void*) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, signal_number);
    sigprocmask(SIG_UNBLOCK, &set, nullptr);
    uintptr_t address = (uintptr_t)info->si_addr;
    uintptr_t stacks = (uintptr_t)fibers[0].stack;
    uintptr_t end = (uintptr_t)shared_dynamic + ((launch.shared_bytes + 1023) & ~1023u);
    if (address >= end && address < end + 4096)
        fail("access past the end of dynamic shared memory: byte %zu of %u", address - (uintptr_t)shared_dynamic, launch.shared_bytes);
    if (address >= stacks - 4096 && address < stacks + MAX_THREADS * STACK_STRIDE)
        fail("stack overflow: more than %zu bytes of local variables", STACK_BYTES);
    fail("illegal memory access at 0x%zx (signal %d)", address, signal_number);
}

void allocate() {
    if (fibers != nullptr) return;
    fibers = (Fiber*)calloc(MAX_THREADS, sizeof(Fiber));
    ready = (uint16_t*)calloc(MAX_THREADS, sizeof(uint16_t));
    uint8_t* stacks = (uint8_t*)mmap(nullptr, MAX_THREADS * STACK_STRIDE, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    shared_region = (uint8_t*)mmap(nullptr, (256 << 10) + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stacks == MAP_FAILED || shared_region == MAP_FAILED) abort();
    for (uint32_t i = 0; i < MAX_THREADS; i++) {
        mprotect(stacks + i * STACK_STRIDE, 4096, PROT_NONE);
        fibers[i].stack = stacks + i * STACK_STRIDE + 4096;
    }
    mprotect(shared_region + (256 << 10), 4096, PROT_NONE);
}

void prepare_block(uint32_t linear) {
    block.linear = linear;
    block.sm = linear % launch.num_multiprocessors;
    block.index = {linear % block.grid.x, linear / block.grid.x % block.grid.y, linear / block.grid.x / block.grid.y};
    memset(warps, 0, sizeof warps);
    memset(barriers, 0, sizeof barriers);
    ready_head = ready_count = 0;
    num_live = num_threads;
    reset_asynchronous();
    poison_shared();
    for (uint32_t i = 0; i < num_threads; i++) {
        Fiber& fiber = fibers[i];
        fiber.index = {i % block.size.x, i / block.size.x % block.size.y, i / block.size.x / block.size.y};
        fiber.linear = i;
        fiber.lane = i % 32;
        fiber.warp = &warps[i / 32];
        fiber.warp->lanes |= 1u << fiber.lane;
        fiber.wait = WAIT_NONE;
        fiber.exited = false;
        fiber.num_copies = fiber.copy_groups = fiber.wgmma_groups = 0;
        // Stacks lie one stride apart: without a shift all their tops would share a few sets of the cache.
        context_prepare(&fiber.context, fiber.stack, STACK_BYTES - (i * 832) % 16384, fiber_entry);
    }
    for (uint32_t i = 0; i < num_threads; i++) wake(&fibers[launch.order == ORDER_REVERSE ? num_threads - 1 - i : i]);
}

void run_block(uint32_t linear) {
    prepare_block(linear);
    Fiber* first = next_ready();
    current = first;
    context_switch(&main_context, &first->context);
    if (failed) return;
    // What must hold at the end of a block is reported through the same way out as errors of fibers.
    const char* trouble = asynchronous_trouble();
    if (trouble != nullptr) {
        failed = true;
        snprintf(message, sizeof message, "block (%u, %u, %u): %s", block.index.x, block.index.y, block.index.z, trouble);
        return;
    }
    uint32_t rounded = (launch.shared_bytes + 1023) & ~1023u;
    for (uint32_t i = launch.shared_bytes; i < rounded; i++)
        if (shared_dynamic[i] != CANARY) {
            failed = true;
            snprintf(message, sizeof message, "block (%u, %u, %u): wrote past the end of dynamic shared memory: byte %u of %u",
                     block.index.x, block.index.y, block.index.z, i, launch.shared_bytes);
            return;
        }
}

void run_grid() {
    uint32_t blocks = block.grid.x * block.grid.y * block.grid.z;
    uint32_t* order = (uint32_t*)malloc(blocks * sizeof(uint32_t));
    for (uint32_t i = 0; i < blocks; i++) order[i] = launch.order == ORDER_REVERSE ? blocks - 1 - i : i;
    if (launch.order == ORDER_SHUFFLED)
        for (uint32_t i = blocks; i > 1; i--) {
            uint32_t other = random_below(i), kept = order[other];
            order[other] = order[i - 1];
            order[i - 1] = kept;
        }
    for (uint32_t i = 0; i < blocks && !failed; i++) run_block(order[i]);
    free(order);
}

}  // namespace

uint32_t random_below(uint32_t limit) {  // xorshift64*, Vigna 2016
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (uint32_t)((uint64_t)(uint32_t)(random_state * 0x2545F4914F6CDD1Dull >> 32) * limit >> 32);
}

void fail(const char* format, ...) {
    static char text[4096];
    const uint3 &b = block.index, &t = current->index;
    int used = snprintf(text, sizeof text, "block (%u, %u, %u), thread (%u, %u, %u): ", b.x, b.y, b.z, t.x, t.y, t.z);
    va_list list;
    va_start(list, format);
    vsnprintf(text + used, sizeof text - used, format, list);
    va_end(list);
    leave(text);
}

void wake(Fiber* fiber) {
    fiber->wait = WAIT_NONE;
    idle_yields = 0;
    ready[(ready_head + ready_count++) & (MAX_THREADS - 1)] = (uint16_t)fiber->linear;
}

void wait_here(Wait kind, const char* file, int line) {
    Fiber* fiber = current_fiber();
    fiber->wait = kind;
    fiber->file = file;
    fiber->line = line;
    switch_away(fiber);
}

void yield() {
    uint32_t idle = idle_yields + 1;
    if (idle > 20000000) fail("spins: 20 million yields and no thread came out of a wait");
    if (idle % 1024 == 0) deliver_one();
    wake(current_fiber());
    idle_yields = idle;
    switch_away(current_fiber());
}

bool warp_arrive(Wait kind, uint32_t mask, void* operand, const char* file, int line) {
    Warp* warp = current->warp;
    uint32_t bit = 1u << current->lane;
    if (!(mask & bit)) fail("%s with mask %08x, which does not name the calling lane %u (%s:%d)", name_of(kind), mask, current->lane, file, line);
    if (mask & ~warp->lanes) fail("%s with mask %08x, but the warp has lanes %08x only (%s:%d)", name_of(kind), mask, warp->lanes, file, line);
    if (mask & warp->exited) fail("%s with mask %08x names lanes that have returned: %08x (%s:%d)", name_of(kind), mask, warp->exited, file, line);
    warp->operands[current->lane] = operand;
    int i = 0;
    while (i < warp->meetings && (warp->meeting[i].mask != mask || warp->meeting[i].kind != kind)) i++;
    if (i == warp->meetings) warp->meeting[warp->meetings++] = {mask, 0, kind};
    warp->meeting[i].arrived |= bit;
    if (warp->meeting[i].arrived == mask) {
        warp->meeting[i] = warp->meeting[--warp->meetings];
        return true;
    }
    wait_here(kind, file, line);
    return false;
}

void warp_release(uint32_t mask) {
    Fiber* first = current_fiber() - current->lane;
    for (uint32_t rest = mask & ~(1u << current->lane); rest != 0; rest &= rest - 1) wake(first + __builtin_ctz(rest));
}

static void barrier_arrive(int id, int threads) {
    if (id < 0 || id > 15) fail("barrier %d: a block has barriers 0 to 15", id);
    if (threads % 32 || threads < 0 || threads > (int)num_threads) fail("barrier %d among %d threads of a block of %u: must be a multiple of 32", id, threads, num_threads);
    Barrier& barrier = barriers[id];
    if (barrier.arrived && barrier.expected != (uint32_t)threads)
        fail("barrier %d among %d threads, while others wait at it among %u", id, threads, barrier.expected);
    barrier.expected = (uint32_t)threads;
    barrier.arrived++;
}

uint32_t barrier_sync(int id, int threads, bool predicate, const char* file, int line) {
    barrier_arrive(id, threads);
    Barrier& barrier = barriers[id];
    barrier.predicates += predicate;
    Fiber* fiber = current_fiber();
    fiber->barrier = id;
    fiber->barrier_threads = threads;
    if (barrier.arrived == (threads ? (uint32_t)threads : num_live)) {
        uint32_t result = barrier.predicates;
        release_barrier(barrier);
        return result;
    }
    fiber->next = barrier.waiting;
    barrier.waiting = fiber;
    wait_here(WAIT_BARRIER, file, line);
    return fiber->barrier_result;
}

void barrier_arrive_only(int id, int threads) {
    if (threads == 0) fail("barrier arrive without a number of threads");
    barrier_arrive(id, threads);
    if (barriers[id].arrived == (uint32_t)threads) release_barrier(barriers[id]);
}

uint8_t* dynamic_shared() { return shared_dynamic; }

uint32_t shared_address(const void* pointer) {
    const uint8_t* p = (const uint8_t*)pointer;
    if (p >= shared_dynamic && p <= shared_dynamic + launch.shared_bytes) return (uint32_t)(p - shared_dynamic) + static_rounded;
    if (p >= shared_static && p <= shared_static + static_bytes) return (uint32_t)(p - shared_static);
    fail("%p is not an address in shared memory", pointer);
}

uint8_t* shared_pointer(uint32_t address, uint32_t bytes, uint32_t alignment) {
    if (address % alignment) fail("shared address %u is not aligned to %u bytes", address, alignment);
    if ((uint64_t)address + bytes <= static_bytes) return shared_static + address;
    if (address < static_rounded || (uint64_t)address + bytes > (uint64_t)static_rounded + launch.shared_bytes)
        fail("%u bytes at shared address %u are outside the block's shared memory (static %u, dynamic %u bytes)", bytes, address, static_bytes, launch.shared_bytes);
    return shared_dynamic + (address - static_rounded);
}

}  // namespace emulator

using namespace emulator;

extern "C" __attribute__((visibility("default"))) const char* emulator_message() { return message; }

// Runs all blocks of a launch. 0, or 1 and emulator_message says what went wrong.
extern "C" __attribute__((visibility("default"))) int emulator_run(const Launch* request) {
    launch = *request;
    allocate();
    (void)static_anchor_storage();
    dl_iterate_phdr(find_static, nullptr);
    static_rounded = (static_bytes + 1023) & ~1023u;
    block.grid = {launch.grid[0], launch.grid[1], launch.grid[2]};
    block.size = {launch.block[0], launch.block[1], launch.block[2]};
    num_threads = block.size.x * block.size.y * block.size.z;
    random_state = launch.seed * 0x9E3779B97F4A7C15ull + 0x1234567;
    failed = false;
    message[0] = 0;
    if (num_threads == 0 || num_threads > MAX_THREADS || static_rounded + launch.shared_bytes > SHARED_LIMIT) {
        snprintf(message, sizeof message, "a block of %u threads, %u bytes of static and %u of dynamic shared memory: limits are %u threads and %u bytes",
                 num_threads, static_bytes, launch.shared_bytes, MAX_THREADS, SHARED_LIMIT);
        return 1;
    }
    uint32_t rounded = (launch.shared_bytes + 1023) & ~1023u;
    shared_dynamic = shared_region + (256 << 10) - rounded;
    memset(shared_dynamic + launch.shared_bytes, CANARY, rounded - launch.shared_bytes);

    static uint8_t* signal_stack = (uint8_t*)malloc(64 << 10);
    stack_t own = {}, old;
    own.ss_sp = signal_stack;
    own.ss_size = 64 << 10;
    sigaltstack(&own, &old);
    struct sigaction action = {}, old_segv, old_bus;
    action.sa_sigaction = handle_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &old_segv);
    sigaction(SIGBUS, &action, &old_bus);
    run_grid();
    sigaction(SIGSEGV, &old_segv, nullptr);
    sigaction(SIGBUS, &old_bus, nullptr);
    sigaltstack(&old, nullptr);
    return failed;
}
