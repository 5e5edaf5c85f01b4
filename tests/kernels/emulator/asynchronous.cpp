// Copies behind a thread's back, and the mbarriers that tell of their end: cp.async, bulk copies, TMA. They happen as late
// as a correct program allows (or as early, or at random: Launch::delivery), so that a missing wait shows as poison.
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace emulator {

void CopyQueue::push(PendingCopy copy) {
    if (count == capacity) {
        capacity = capacity ? 2 * capacity : 32;
        copies = (PendingCopy*)realloc(copies, capacity * sizeof(PendingCopy));
    }
    copy.group = groups;
    copies[count++] = copy;
}

// ---- cp.async --------------------------------------------------------------------------------------------------------

static void load(const PendingCopy& copy) {
    memcpy(copy.shared, copy.global, copy.valid);
    memset(copy.shared + copy.valid, 0, 16 - copy.valid);
}

void cp_async(uint32_t shared, const void* global, int valid) {
    if (valid < 0 || valid > 16) fail("cp_async_16 with %d valid bytes", valid);
    if ((uintptr_t)global % 16) fail("cp_async_16 from %p, which is not aligned to 16 bytes", global);
    PendingCopy copy = {shared_pointer(shared, 16, 16), global, nullptr, 0, 0, (uint32_t)valid, 0};
    touch_source(global, copy.valid);
    if (happens_now()) load(copy);
    else current_fiber()->loads.push(copy);
}

void cp_async_commit() { current_fiber()->loads.groups++; }
void cp_async_wait(int pending) { current_fiber()->loads.complete(pending, load); }

// ---- mbarriers: one 64-bit word in shared memory ---------------------------------------------------------------------

namespace {

struct Mbarrier {
    uint32_t phase : 1, expected : 15, pending : 15, invalid : 1;  // shared memory is poisoned with ones: invalid
    int32_t bytes;                                                 // still to be delivered in this phase
};
static_assert(sizeof(Mbarrier) == 8);

Fiber* mbarrier_waiters[MAX_CLUSTER * MAX_THREADS];
uint32_t num_mbarrier_waiters;

Mbarrier* mbarrier_at(BlockState* block, uint32_t address) {
    if (block->num_live == 0) fail("the mbarrier at shared address %u of block %u of the cluster: that block has ended", address, block->cluster_rank);
    Mbarrier* state = (Mbarrier*)shared_pointer_of(block, address, 8, 8);
    if (state->invalid || state->expected == 0) fail("the mbarrier at shared address %u is not initialised", address);
    return state;
}

void advance(BlockState* block, uint32_t address) {
    Mbarrier* state = mbarrier_at(block, address);
    if (state->pending != 0 || state->bytes != 0) return;
    state->phase ^= 1;
    state->pending = state->expected;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < num_mbarrier_waiters; i++) {
        Fiber* fiber = mbarrier_waiters[i];
        if (fiber->mbarrier == address && fiber->block == block && fiber->parity != (int)state->phase) wake(fiber);
        else mbarrier_waiters[kept++] = fiber;
    }
    num_mbarrier_waiters = kept;
}

BlockState* block_of_rank(uint32_t rank) {
    if (rank == OWN_RANK) return current_block();
    if (rank >= launch.cluster) fail("block %u of a cluster of %u", rank, launch.cluster);
    return &blocks[rank];
}

}  // namespace

void mbarrier_describe(const Fiber& waiter, char* out, size_t size) {
    Mbarrier state;
    memcpy(&state, shared_pointer_of(block_of(&waiter), waiter.mbarrier, 8, 8), 8);
    snprintf(out, size, "mbarrier at shared address %u, parity %d; its phase has parity %u and lacks %u of %u arrivals and %d bytes",
             waiter.mbarrier, waiter.parity, state.phase, state.pending, state.expected, state.bytes);
}

void mbarrier_init(uint64_t* bar, int arrivals) {
    shared_pointer(shared_address(bar), 8, 8);
    if (arrivals < 1 || arrivals > (int)(MAX_CLUSTER * MAX_THREADS)) fail("mbarrier_init with %d arrivals", arrivals);
    Mbarrier state = {0, (uint32_t)arrivals, (uint32_t)arrivals, 0, 0};
    memcpy(bar, &state, 8);
}

void mbarrier_arrive(uint64_t* bar, int arrivals, int expect_bytes, uint32_t rank) {
    BlockState* block = block_of_rank(rank);
    uint32_t address = shared_address(bar);
    Mbarrier* state = mbarrier_at(block, address);
    if ((int)state->pending < arrivals) fail("more arrivals at the mbarrier at shared address %u than the %u of a phase", address, state->expected);
    if (expect_bytes < 0 || expect_bytes >= 1 << 20) fail("an mbarrier is told to expect %d bytes", expect_bytes);
    state->bytes += expect_bytes;
    state->pending -= (uint32_t)arrivals;
    advance(block, address);
}

bool mbarrier_done(uint64_t* bar, int parity) {
    if (parity != 0 && parity != 1) fail("mbarrier_wait for parity %d", parity);
    return mbarrier_at(current_block(), shared_address(bar))->phase != (uint32_t)parity;
}

void mbarrier_wait(uint64_t* bar, int parity, const char* file, int line) {
    if (mbarrier_done(bar, parity)) return;
    Fiber* fiber = current_fiber();
    fiber->mbarrier = shared_address(bar);
    fiber->parity = parity;
    mbarrier_waiters[num_mbarrier_waiters++] = fiber;
    wait_here(WAIT_MBARRIER, file, line);
}

// ---- bulk copies and TMA ---------------------------------------------------------------------------------------------

namespace {

struct BulkCopy {
    BlockState* block;
    uint32_t shared, bar;
    const void* global;  // of a plain copy
    const TensorMap* map;
    uint32_t bytes;
    int x, y;
    bool speculative;
};

constexpr uint32_t MAX_IN_FLIGHT = 16384;
BulkCopy in_flight[MAX_IN_FLIGHT];
uint32_t num_in_flight;

// 128-byte swizzle: bits 4..6 of the shared address ^= bits 7..9 (PTX ISA, "Swizzling modes").
uint32_t swizzle(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// Calls move(global or null, shared, bytes) for each piece of up to 16 bytes of a box; null: outside the tensor.
template <class Move> void for_box(const TensorMap& map, int x, int y, uint32_t shared, Move move) {
    if (map.tiles) {
        for (int64_t row = y; row < (int64_t)y + map.box_rows; row++, shared += 2048)
            move(row < map.rows && x < map.columns ? (uint8_t*)map.address + row * map.row_bytes + x * 2048 : nullptr, shared, 2048);
        return;
    }
    for (int64_t row = y; row < (int64_t)y + map.box_rows; row++)
        for (int chunk = 0; chunk < 8; chunk++) {
            uint32_t place = swizzle(shared + (uint32_t)(row - y) * 128 + (uint32_t)chunk * 16);
            int64_t column = (int64_t)x + chunk * 8;
            uint8_t* line = (uint8_t*)map.address + row * map.row_bytes;
            if (row < 0 || row >= map.rows || column <= -8 || column >= map.columns) move(nullptr, place, 16);
            else if (column >= 0 && column + 8 <= map.columns) move(line + column * 2, place, 16);
            else
                for (int i = 0; i < 8; i++)
                    move(column + i >= 0 && column + i < map.columns ? line + (column + i) * 2 : nullptr, place + (uint32_t)i * 2, 2);
        }
}

void deliver(uint32_t index) {
    BulkCopy copy = in_flight[index];
    memmove(in_flight + index, in_flight + index + 1, (--num_in_flight - index) * sizeof(BulkCopy));
    Mbarrier* state = mbarrier_at(copy.block, copy.bar);
    uint8_t* target = shared_pointer_of(copy.block, copy.shared, copy.bytes, 16);
    if (copy.speculative) allow_speculation(true);
    if (copy.map == nullptr) memcpy(target, copy.global, copy.bytes);
    else
        for_box(*copy.map, copy.x, copy.y, copy.shared, [&](const uint8_t* global, uint32_t shared, size_t bytes) {
            uint8_t* place = target + (shared - copy.shared);
            if (global == nullptr) memset(place, 0, bytes);
            else memcpy(place, global, bytes);
        });
    if (copy.speculative) allow_speculation(false);
    state->bytes -= (int32_t)copy.bytes;
    advance(copy.block, copy.bar);
}

void start(BulkCopy copy, uint32_t alignment, uint32_t ranks) {
    copy.speculative = current_fiber()->speculates;
    for (uint32_t rank = 0; rank < 32; rank++) {
        if (ranks != 0 && !(ranks >> rank & 1)) continue;
        copy.block = block_of_rank(ranks == 0 ? OWN_RANK : rank);
        mbarrier_at(copy.block, copy.bar);
        shared_pointer_of(copy.block, copy.shared, copy.bytes, alignment);
        if (num_in_flight == MAX_IN_FLIGHT) fail("more than %u bulk copies in flight", MAX_IN_FLIGHT);
        in_flight[num_in_flight++] = copy;
        if (launch.delivery == DELIVER_EARLY) deliver(num_in_flight - 1);
        if (ranks == 0) return;
    }
}

}  // namespace

bool deliver_one() {
    if (num_in_flight == 0) return false;
    uint32_t index = 0;  // copies may end in any order
    if (launch.order == ORDER_REVERSE) index = num_in_flight - 1;
    if (launch.order == ORDER_SHUFFLED) index = random_below(num_in_flight);
    deliver(index);
    return true;
}

void deliver_some() {
    if (launch.delivery == DELIVER_RANDOM && num_in_flight != 0 && random_below(8) == 0) deliver_one();
}

void bulk_copy(void* shared, const void* global, int bytes, uint64_t* bar, uint32_t ranks) {
    if (bytes <= 0 || bytes % 16) fail("bulk_copy of %d bytes: must be a positive multiple of 16", bytes);
    if ((uintptr_t)global % 16) fail("bulk_copy from %p, which is not aligned to 16 bytes", global);
    start({nullptr, shared_address(shared), shared_address(bar), global, nullptr, (uint32_t)bytes, 0, 0, false}, 16, ranks);
}

void tma_load_2d(void* shared, const TensorMap* map, int x, int y, uint64_t* bar, uint32_t ranks) {
    if (map->tiles) fail("tma_load_2d from a map of tiles");
    uint32_t bytes = (uint32_t)map->box_rows * 128;
    start({nullptr, shared_address(shared), shared_address(bar), nullptr, map, bytes, x, y, false}, 128, ranks);
}

void tma_load_tiles(void* shared, const TensorMap* map, int k_tile, int row_tile, uint64_t* bar, uint32_t ranks) {
    if (!map->tiles || k_tile < 0 || row_tile < 0) fail("tma_load_tiles of tile (%d, %d): not a map of tiles, or before its start", row_tile, k_tile);
    start({nullptr, shared_address(shared), shared_address(bar), nullptr, map, (uint32_t)map->box_rows * 2048, k_tile, row_tile, false}, 128, ranks);
}

static void store_box(const PendingCopy& copy) {
    uint32_t base = shared_address(copy.shared);
    for_box(*copy.map, copy.x, copy.y, base, [&](uint8_t* global, uint32_t shared, size_t bytes) {
        if (global != nullptr) memcpy(global, copy.shared + (shared - base), bytes);
    });
}

void tma_store_2d(const TensorMap* map, int x, int y, const void* shared) {
    uint32_t bytes = (uint32_t)map->box_rows * 128;
    // Seen on an H200: the last 16 bytes of a row are written whole, past the tensor's end.
    if (map->tiles || map->columns % 8) fail("tma_store_2d into rows of %d bytes: must be a multiple of 16", (int)map->columns * 2);
    PendingCopy copy = {shared_pointer(shared_address(shared), bytes, 128), nullptr, map, x, y, 0, 0};
    if (happens_now()) store_box(copy);
    else current_fiber()->stores.push(copy);
}

void bulk_commit() { current_fiber()->stores.groups++; }
void bulk_wait(int pending) { current_fiber()->stores.complete(pending, store_box); }

// ---- begin and end ---------------------------------------------------------------------------------------------------

void reset_copies() { num_in_flight = num_mbarrier_waiters = 0; }

void check_copies_of(Fiber* fiber) {
    if (fiber->stores.count != 0) fail("returns while its tma_store_2d may still read shared memory: bulk_commit and bulk_wait_read are missing");
}

const char* copies_trouble() {
    static char text[128];
    if (num_in_flight == 0) return nullptr;
    snprintf(text, sizeof text, "ended with %u bulk copies in flight", num_in_flight);
    return text;
}

}  // namespace emulator
