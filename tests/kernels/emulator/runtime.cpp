// Fibers, and where they meet: warps, barriers, clusters. See runtime.h.
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

EMULATOR_SWITCH_ASSEMBLY

namespace emulator {

Thread* current;
Launch launch;

namespace {

constexpr uint32_t RING = MAX_CLUSTER * MAX_THREADS;  // a power of two
constexpr uint32_t SHARED_LIMIT = 227 << 10;          // of a block on sm_90

Context main_context;
uint16_t ready[RING];  // fibers that can run
uint32_t ready_head, ready_count;
uint32_t num_threads;  // of a block
uint32_t idle_yields;
uint64_t random_state;

struct {
    uint32_t arrived, generation;
    Fiber* waiting;
} cluster_barrier;

Fiber* next_ready() {
    while (ready_count == 0)
        if (!deliver_one() && !previous_ends()) deadlock();
    if (launch.order == ORDER_SHUFFLED) {
        // Mostly among the warp at the front, whose stacks are in the cache.
        uint32_t choice = random_below(32) != 0 && ready_count > 32 ? 32 : ready_count;
        uint32_t other = (ready_head + random_below(choice)) & (RING - 1);
        uint16_t chosen = ready[other];
        ready[other] = ready[ready_head];
        ready[ready_head] = chosen;
    }
    Fiber* fiber = &fibers[ready[ready_head]];
    ready_head = (ready_head + 1) & (RING - 1);
    ready_count--;
    return fiber;
}

void switch_away(Fiber* from) {
    deliver_some();
    Fiber* to = next_ready();
    if (to == from) return;
    if (to->block != from->block) load_statics(block_of(to));
    current = to;
    context_switch(&from->context, &to->context);
}

void wake_list(Fiber*& list) {
    for (Fiber* fiber = list; fiber != nullptr; fiber = fiber->next) wake(fiber);
    list = nullptr;
}

void release_barrier(Barrier& barrier) {
    for (Fiber* fiber = barrier.waiting; fiber != nullptr; fiber = fiber->next) fiber->barrier_result = barrier.predicates;
    wake_list(barrier.waiting);
    barrier = {};
}

void advance_cluster_barrier() {
    if (cluster_barrier.arrived == 0 || cluster_barrier.arrived < cluster_live()) return;
    cluster_barrier.arrived = 0;
    cluster_barrier.generation++;
    wake_list(cluster_barrier.waiting);
}

void exit_fiber() {
    Fiber* fiber = current_fiber();
    BlockState* block = block_of(fiber);
    Warp* warp = fiber->warp;
    for (int i = 0; i < warp->meetings; i++)
        if (warp->meeting[i].mask >> fiber->lane & 1)
            fail("returns while lanes %08x of its warp wait for it at %s (mask %08x)", warp->meeting[i].arrived,
                 name_of(warp->meeting[i].kind), warp->meeting[i].mask);
    check_copies_of(fiber);
    check_wgmma_of(fiber);
    warp->exited |= 1u << fiber->lane;
    fiber->exited = true;
    block->num_live--;
    if (cluster_live() == 0) leave_fibers();
    // Those at __syncthreads and at the cluster's barrier no longer wait for this one.
    Barrier& barrier = block->barriers[0];
    if (barrier.waiting != nullptr && barrier.expected == 0 && barrier.arrived == block->num_live) release_barrier(barrier);
    advance_cluster_barrier();
    switch_away(fiber);
    __builtin_unreachable();
}

void fiber_entry() {
    launch.invoke(launch.arguments);
    exit_fiber();
}

void prepare_fiber(BlockState& block, uint32_t linear) {
    Fiber& fiber = block.fibers[linear];
    fiber.index = {linear % block.size.x, linear / block.size.x % block.size.y, linear / block.size.x / block.size.y};
    fiber.linear = linear;
    fiber.lane = linear % 32;
    fiber.warp = &block.warps[linear / 32];
    fiber.warp->lanes |= 1u << fiber.lane;
    fiber.block = &block;
    fiber.wait = WAIT_NONE;
    fiber.exited = fiber.speculates = false;
    fiber.loads.count = fiber.loads.groups = fiber.stores.count = fiber.stores.groups = fiber.wgmma_groups = 0;
    fiber.cluster_arrivals = 0;
    fiber.wgmma_fenced = false;
    // Stacks lie one stride apart: without a shift all their tops would share a few sets of the cache.
    context_prepare(&fiber.context, fiber.stack, STACK_BYTES - (linear * 832) % 16384, fiber_entry);
}

void prepare_block(uint32_t rank, uint32_t linear) {
    BlockState& block = blocks[rank];
    block.size = {launch.block[0], launch.block[1], launch.block[2]};
    block.grid = {launch.grid[0], launch.grid[1], launch.grid[2]};
    block.linear = linear;
    block.sm = linear % launch.num_multiprocessors;
    block.index = {linear % block.grid.x, linear / block.grid.x % block.grid.y, linear / block.grid.x / block.grid.y};
    block.cluster_rank = rank;
    block.cluster_size = launch.cluster;
    block.num_live = num_threads;
    block.lets_next_begin = false;
    memset(block.warps, 0, sizeof block.warps);
    memset(block.barriers, 0, sizeof block.barriers);
    for (uint32_t i = 0; i < num_threads; i++) prepare_fiber(block, i);
}

void run_cluster(uint32_t index) {
    ready_head = ready_count = 0;
    cluster_barrier = {};
    reset_copies();
    reset_tensor_cores();
    poison_shared();
    begin_dependent_cluster();
    for (uint32_t rank = 0; rank < launch.cluster; rank++) prepare_block(rank, index * launch.cluster + rank);
    uint32_t total = launch.cluster * num_threads;
    for (uint32_t i = 0; i < total; i++) {
        uint32_t place = launch.order == ORDER_REVERSE ? total - 1 - i : i;
        wake(&blocks[place / num_threads].fibers[place % num_threads]);
    }
    Fiber* first = next_ready();
    load_statics(block_of(first));
    current = first;
    context_switch(&main_context, &first->context);
    const char* trouble = failed ? nullptr : copies_trouble();
    if (trouble == nullptr && !failed) trouble = memory_trouble();
    if (trouble == nullptr) return;
    failed = true;
    const uint3& at = blocks[0].index;
    snprintf(message, sizeof message, "block (%u, %u, %u): %s", at.x, at.y, at.z, trouble);
}

void run_grid() {
    uint32_t clusters = launch.grid[0] * launch.grid[1] * launch.grid[2] / launch.cluster;
    uint32_t* order = (uint32_t*)malloc(clusters * sizeof(uint32_t));
    for (uint32_t i = 0; i < clusters; i++) order[i] = launch.order == ORDER_REVERSE ? clusters - 1 - i : i;
    if (launch.order == ORDER_SHUFFLED)
        for (uint32_t i = clusters; i > 1; i--) {
            uint32_t other = random_below(i), kept = order[other];
            order[other] = order[i - 1];
            order[i - 1] = kept;
        }
    for (uint32_t i = 0; i < clusters && !failed; i++) run_cluster(order[i]);
    free(order);
}

}  // namespace

uint32_t random_below(uint32_t limit) {  // xorshift64*, Vigna 2016
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (uint32_t)((uint64_t)(uint32_t)(random_state * 0x2545F4914F6CDD1Dull >> 32) * limit >> 32);
}

bool happens_now() {
    return launch.delivery == DELIVER_EARLY || (launch.delivery == DELIVER_RANDOM && random_below(2));
}

uint32_t cluster_live() {
    uint32_t live = 0;
    for (uint32_t rank = 0; rank < launch.cluster; rank++) live += blocks[rank].num_live;
    return live;
}

void leave_fibers() {
    Context lost;
    context_switch(&lost, &main_context);
}

void wake(Fiber* fiber) {
    fiber->wait = WAIT_NONE;
    idle_yields = 0;
    ready[(ready_head + ready_count++) & (RING - 1)] = (uint16_t)number_of(fiber);
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
    if (idle > 20000000) fail("spins: 20 million times round and no thread came out of a wait");
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

// The lanes go on before other warps do: one warp after another runs as far as it can, its stacks in the cache.
void warp_release(uint32_t mask) {
    Fiber* first = current_fiber() - current->lane;
    bool reverse = launch.order == ORDER_REVERSE;
    for (uint32_t rest = mask & ~(1u << current->lane); rest != 0;) {
        int lane = reverse ? __builtin_ctz(rest) : 31 - __builtin_clz(rest);  // the last to be put in front is the first to run
        rest &= ~(1u << lane);
        first[lane].wait = WAIT_NONE;
        ready_head = (ready_head - 1) & (RING - 1);
        ready[ready_head] = (uint16_t)number_of(first + lane);
        ready_count++;
    }
    idle_yields = 0;
}

static Barrier& barrier_arrive(int id, int threads) {
    if (id < 0 || id > 15) fail("barrier %d: a block has barriers 0 to 15", id);
    if (threads % 32 || threads < 0 || threads > (int)num_threads)
        fail("barrier %d among %d threads of a block of %u: must be a multiple of 32", id, threads, num_threads);
    Barrier& barrier = current_block()->barriers[id];
    if (barrier.arrived && barrier.expected != (uint32_t)threads)
        fail("barrier %d among %d threads, while others wait at it among %u", id, threads, barrier.expected);
    barrier.expected = (uint32_t)threads;
    barrier.arrived++;
    return barrier;
}

uint32_t barrier_sync(int id, int threads, bool predicate, const char* file, int line) {
    Barrier& barrier = barrier_arrive(id, threads);
    barrier.predicates += predicate;
    if (barrier.arrived == (threads ? (uint32_t)threads : current_block()->num_live)) {
        uint32_t result = barrier.predicates;
        release_barrier(barrier);
        return result;
    }
    Fiber* fiber = current_fiber();
    fiber->barrier = id;
    fiber->barrier_threads = threads;
    fiber->next = barrier.waiting;
    barrier.waiting = fiber;
    wait_here(WAIT_BARRIER, file, line);
    return fiber->barrier_result;
}

void barrier_arrive_only(int id, int threads) {
    if (threads == 0) fail("barrier %d: an arrival without the number of threads", id);
    Barrier& barrier = barrier_arrive(id, threads);
    if (barrier.arrived == (uint32_t)threads) release_barrier(barrier);
}

// A thread's n-th wait is for the end of the barrier's n-th phase.
void cluster_arrive() {
    Fiber* fiber = current_fiber();
    if (fiber->cluster_arrivals++ != cluster_barrier.generation) fail("cluster_arrive without the cluster_wait of the one before");
    cluster_barrier.arrived++;
    advance_cluster_barrier();
}

void cluster_wait(const char* file, int line) {
    Fiber* fiber = current_fiber();
    if (fiber->cluster_arrivals == cluster_barrier.generation) return;
    if (fiber->cluster_arrivals != cluster_barrier.generation + 1) fail("cluster_wait without cluster_arrive");
    fiber->next = cluster_barrier.waiting;
    cluster_barrier.waiting = fiber;
    wait_here(WAIT_CLUSTER, file, line);
}

}  // namespace emulator

using namespace emulator;

extern "C" __attribute__((visibility("default"))) const char* emulator_message() { return message; }

// Runs all blocks of a launch. 0, or 1 and emulator_message says what went wrong.
extern "C" __attribute__((visibility("default"))) int emulator_run(Launch* request) {
    launch = *request;
    num_threads = launch.block[0] * launch.block[1] * launch.block[2];
    random_state = launch.seed * 0x9E3779B97F4A7C15ull + 0x1234567;
    failed = false;
    message[0] = 0;
    if (num_threads == 0 || num_threads > MAX_THREADS || launch.shared_bytes > SHARED_LIMIT || launch.cluster == 0 || launch.cluster > MAX_CLUSTER) {
        snprintf(message, sizeof message, "%u threads, %u bytes of dynamic shared memory, cluster of %u: at most %u, %u and %u",
                 num_threads, launch.shared_bytes, launch.cluster, MAX_THREADS, SHARED_LIMIT, MAX_CLUSTER);
        return 1;
    }
    prepare_memory();
    if (static_shared_bytes() + launch.shared_bytes > SHARED_LIMIT) {
        snprintf(message, sizeof message, "%u bytes of static and %u of dynamic shared memory: more than %u", static_shared_bytes(), launch.shared_bytes, SHARED_LIMIT);
        return 1;
    }
    catch_faults(true);
    begin_dependent_launch();
    run_grid();
    const char* trouble = end_dependent_launch();
    request->begins_late = launch.begins_late;
    catch_faults(false);
    if (!failed && trouble != nullptr) {
        failed = true;
        snprintf(message, sizeof message, "%s", trouble);
    }
    return failed;
}
