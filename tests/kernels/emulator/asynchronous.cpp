// What happens behind a thread's back: cp.async, mbarriers, bulk copies, TMA, wgmma; and the tensor cores' arithmetic.
// All of it happens as late as a correct program allows (or as early, or at random: Launch::delivery), so that a missing
// wait shows as poison.
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace emulator {

namespace {

float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

bool now() { return launch.delivery == DELIVER_EARLY || (launch.delivery == DELIVER_RANDOM && random_below(2)); }

// acc (M x N) += a (M x 16) b (16 x N): k ascending in double, rounded to fp32 once. Products of bf16 are exact.
template <int M>
void multiply(float* acc, const float (*a)[16], const float* b, int n) {
    double row[256];
    for (int m = 0; m < M; m++) {
        for (int j = 0; j < n; j++) row[j] = acc[m * n + j];
        for (int k = 0; k < 16; k++) {
            double factor = a[m][k];
            const float* line = b + k * n;
            for (int j = 0; j < n; j++) row[j] += factor * line[j];
        }
        for (int j = 0; j < n; j++) acc[m * n + j] = (float)row[j];
    }
}

}  // namespace

void mma_16816(MmaOperand** lanes) {
    float a[16][16], b[16 * 8], acc[16 * 8];
    for (int lane = 0; lane < 32; lane++) {
        const MmaOperand& op = *lanes[lane];
        int g = lane / 4, q = lane % 4;
        for (int i = 0; i < 4; i++)
            for (int h = 0; h < 2; h++)
                a[g + 8 * (i & 1)][2 * q + h + 8 * (i >> 1)] = from_bf16((uint16_t)(op.a[i] >> 16 * h));
        for (int h = 0; h < 2; h++) {
            b[(2 * q + h) * 8 + g] = from_bf16((uint16_t)(op.b0 >> 16 * h));
            b[(2 * q + h + 8) * 8 + g] = from_bf16((uint16_t)(op.b1 >> 16 * h));
        }
        for (int i = 0; i < 4; i++) acc[(g + 8 * (i >> 1)) * 8 + 2 * q + (i & 1)] = op.d[i];
    }
    multiply<16>(acc, a, b, 8);
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) lanes[lane]->d[i] = acc[(lane / 4 + 8 * (i >> 1)) * 8 + 2 * (lane % 4) + (i & 1)];
}

// ---- cp.async --------------------------------------------------------------------------------------------------------

static void perform(const PendingCopy& copy) {
    memcpy(copy.shared, copy.global, copy.valid);
    memset(copy.shared + copy.valid, 0, 16 - copy.valid);
}

void cp_async(uint32_t shared, const void* global, int valid) {
    if (valid < 0 || valid > 16) fail("cp_async_16 with %d valid bytes", valid);
    if ((uintptr_t)global % 16) fail("cp_async_16 from %p, which is not aligned to 16 bytes", global);
    Fiber* fiber = current_fiber();
    PendingCopy copy = {shared_pointer(shared, 16, 16), global, (uint32_t)valid, fiber->copy_groups};
    if (now()) return perform(copy);
    if (fiber->num_copies == fiber->copies_capacity) {
        fiber->copies_capacity = fiber->copies_capacity ? 2 * fiber->copies_capacity : 32;
        fiber->copies = (PendingCopy*)realloc(fiber->copies, fiber->copies_capacity * sizeof(PendingCopy));
    }
    fiber->copies[fiber->num_copies++] = copy;
}

void cp_async_commit() { current_fiber()->copy_groups++; }

void cp_async_wait(int pending) {
    Fiber* fiber = current_fiber();
    uint32_t done = 0;
    while (done < fiber->num_copies && (int64_t)fiber->copies[done].group < (int64_t)fiber->copy_groups - pending)
        perform(fiber->copies[done++]);
    fiber->num_copies -= done;
    memmove(fiber->copies, fiber->copies + done, fiber->num_copies * sizeof(PendingCopy));
}

// ---- mbarriers: one 64-bit word in shared memory ---------------------------------------------------------------------

namespace {

struct Mbarrier {
    uint32_t phase : 1, expected : 15, pending : 15, invalid : 1;  // shared memory is poisoned with ones: invalid
    int32_t bytes;                                                 // still to be delivered in this phase
};
static_assert(sizeof(Mbarrier) == 8);

Fiber* mbarrier_waiters[MAX_THREADS];
uint32_t num_mbarrier_waiters;

Mbarrier* valid_mbarrier(uint64_t* bar) {
    shared_pointer(shared_address(bar), 8, 8);
    Mbarrier* state = (Mbarrier*)bar;
    if (state->invalid || state->expected == 0) fail("the mbarrier at shared address %u is not initialised", shared_address(bar));
    return state;
}

void advance(uint64_t* bar) {
    Mbarrier* state = (Mbarrier*)bar;
    if (state->pending != 0 || state->bytes != 0) return;
    state->phase ^= 1;
    state->pending = state->expected;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < num_mbarrier_waiters; i++) {
        Fiber* fiber = mbarrier_waiters[i];
        if (fiber->mbarrier == bar && fiber->parity != (int)state->phase) wake(fiber);
        else mbarrier_waiters[kept++] = fiber;
    }
    num_mbarrier_waiters = kept;
}

}  // namespace

void mbarrier_describe(uint64_t* bar, char* out, size_t size) {
    Mbarrier state;
    memcpy(&state, bar, 8);
    if (state.invalid || state.expected == 0) snprintf(out, size, "it is not initialised");
    else snprintf(out, size, "its current phase has parity %u and lacks %u of %u arrivals and %d bytes", state.phase, state.pending, state.expected, state.bytes);
}

void mbarrier_init(uint64_t* bar, int arrivals) {
    shared_pointer(shared_address(bar), 8, 8);
    if (arrivals < 1 || arrivals > (int)MAX_THREADS) fail("mbarrier_init with %d arrivals", arrivals);
    Mbarrier state = {0, (uint32_t)arrivals, (uint32_t)arrivals, 0, 0};
    memcpy(bar, &state, 8);
}

void mbarrier_arrive(uint64_t* bar, int arrivals, int expect_bytes) {
    Mbarrier* state = valid_mbarrier(bar);
    if ((int)state->pending < arrivals) fail("more arrivals at the mbarrier at shared address %u than the %u of a phase", shared_address(bar), state->expected);
    if (expect_bytes < 0 || expect_bytes >= 1 << 20) fail("an mbarrier is told to expect %d bytes", expect_bytes);
    state->bytes += expect_bytes;
    state->pending -= (uint32_t)arrivals;
    advance(bar);
}

bool mbarrier_done(uint64_t* bar, int parity) {
    if (parity != 0 && parity != 1) fail("mbarrier_wait for parity %d", parity);
    return valid_mbarrier(bar)->phase != (uint32_t)parity;
}

void mbarrier_wait(uint64_t* bar, int parity, const char* file, int line) {
    if (mbarrier_done(bar, parity)) return;
    Fiber* fiber = current_fiber();
    fiber->mbarrier = bar;
    fiber->parity = parity;
    mbarrier_waiters[num_mbarrier_waiters++] = fiber;
    wait_here(WAIT_MBARRIER, file, line);
}

// ---- bulk copies and TMA ---------------------------------------------------------------------------------------------

namespace {

struct BulkCopy {
    uint8_t* shared;
    uint64_t* bar;
    const void* global;  // of a plain copy
    const TensorMap* map;
    uint32_t bytes;
    int x, y;
};

constexpr uint32_t MAX_IN_FLIGHT = 4096;
BulkCopy in_flight[MAX_IN_FLIGHT];
uint32_t num_in_flight;

void copy_box(const BulkCopy& copy) {
    const TensorMap& map = *copy.map;
    uint32_t base = shared_address(copy.shared);
    for (int r = 0; r < map.box_rows; r++) {
        for (int chunk = 0; chunk < 8; chunk++) {
            uint16_t values[8] = {};
            int64_t row = (int64_t)copy.y + r;
            for (int i = 0; i < 8; i++) {
                int64_t column = (int64_t)copy.x + chunk * 8 + i;
                if (row >= 0 && row < map.rows && column >= 0 && column < map.columns)
                    memcpy(&values[i], (const uint8_t*)map.address + row * map.row_bytes + column * 2, 2);
            }
            uint32_t address = base + (uint32_t)r * 128 + (uint32_t)chunk * 16;
            memcpy(shared_pointer(address ^ (address >> 7 & 7) << 4, 16, 16), values, 16);
        }
    }
}

void deliver(uint32_t index) {
    BulkCopy copy = in_flight[index];
    memmove(in_flight + index, in_flight + index + 1, (--num_in_flight - index) * sizeof(BulkCopy));
    if (copy.map != nullptr) copy_box(copy);
    else memcpy(copy.shared, copy.global, copy.bytes);
    Mbarrier* state = valid_mbarrier(copy.bar);
    state->bytes -= (int32_t)copy.bytes;
    advance(copy.bar);
}

void start(const BulkCopy& copy) {
    valid_mbarrier(copy.bar);
    if (num_in_flight == MAX_IN_FLIGHT) fail("more than %u bulk copies in flight", MAX_IN_FLIGHT);
    in_flight[num_in_flight++] = copy;
    if (launch.delivery == DELIVER_EARLY) deliver(num_in_flight - 1);
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

void bulk_copy(void* shared, const void* global, int bytes, uint64_t* bar) {
    if (bytes <= 0 || bytes % 16) fail("bulk_copy of %d bytes: must be a positive multiple of 16", bytes);
    if ((uintptr_t)global % 16) fail("bulk_copy from %p, which is not aligned to 16 bytes", global);
    uint8_t* target = shared_pointer(shared_address(shared), (uint32_t)bytes, 16);
    start({target, bar, global, nullptr, (uint32_t)bytes, 0, 0});
}

void tma_load_2d(void* shared, const TensorMap* map, int x, int y, uint64_t* bar) {
    uint32_t bytes = (uint32_t)map->box_rows * 128;
    uint8_t* target = shared_pointer(shared_address(shared), bytes, 128);
    start({target, bar, nullptr, map, bytes, x, y});
}

// ---- wgmma -----------------------------------------------------------------------------------------------------------

namespace {

constexpr int MAX_WARPGROUPS = MAX_THREADS / 128;
constexpr int MAX_OPERATIONS = 64;

struct Operand {
    float* d;
    const uint32_t* a;
    int n;
    bool accumulate;
    uint64_t a_descriptor, b_descriptor;
};

// The accumulator of operations in flight: d of the lanes is poison meanwhile.
struct Accumulator {
    float* d[128];
    int n;
    int operations;  // in flight
    float value[64 * 256];
};

struct Operation {
    int accumulator, n;
    bool accumulate, a_in_registers;
    uint32_t group;
    uint64_t a_descriptor, b_descriptor;
    float a[64][16];  // of registers
};

struct Warpgroup {
    uint32_t arrived;
    Operand* operands[128];
    int num_operations;
    Operation operations[MAX_OPERATIONS];
    int num_accumulators;
    Accumulator* accumulators[8];
};

Warpgroup* warpgroups;

int accumulator_row(int thread, int i) { return thread / 32 * 16 + thread % 32 / 4 + 8 * (i >> 1 & 1); }
int accumulator_column(int thread, int i) { return (i >> 2) * 8 + 2 * (thread % 4) + (i & 1); }

int find_accumulator(Warpgroup& group, int n) {
    for (int i = 0; i < group.num_accumulators; i++) {
        Accumulator& found = *group.accumulators[i];
        if (found.operations == 0 || found.d[0] != group.operands[0]->d) continue;
        if (found.n != n) fail("wgmma of n %d into an accumulator of a pending wgmma of n %d", n, found.n);
        return i;
    }
    int i = 0;
    while (i < group.num_accumulators && group.accumulators[i]->operations != 0) i++;
    if (i == 8) fail("more than 8 accumulators of wgmma in flight");
    if (i == group.num_accumulators) group.accumulators[group.num_accumulators++] = (Accumulator*)malloc(sizeof(Accumulator));
    Accumulator& fresh = *group.accumulators[i];
    fresh.n = n;
    fresh.operations = 0;
    for (int thread = 0; thread < 128; thread++) {
        float* d = fresh.d[thread] = group.operands[thread]->d;
        for (int j = 0; j < n / 2; j++) fresh.value[accumulator_row(thread, j) * n + accumulator_column(thread, j)] = d[j];
        memset(d, 0xFF, (size_t)n / 2 * sizeof(float));
    }
    return i;
}

// Row `row` (of 8-row atoms), columns 0..15 of a K-major operand. PTX ISA, "Shared memory matrix layout".
void load_row(float* out, int stride, uint64_t descriptor, int row) {
    uint32_t start = (uint32_t)(descriptor & 0x3FFF) << 4, leading = (uint32_t)(descriptor >> 16 & 0x3FFF) << 4;
    uint32_t atoms = (uint32_t)(descriptor >> 32 & 0x3FFF) << 4, mode = (uint32_t)(descriptor >> 62);
    for (int chunk = 0; chunk < 2; chunk++) {
        uint32_t address = start + (uint32_t)(row / 8) * atoms;
        if (mode == 1) address += (uint32_t)(row % 8) * 128 + (uint32_t)chunk * 16, address ^= (address >> 7 & 7) << 4;
        else if (mode == 2) address += (uint32_t)(row % 8) * 64 + (uint32_t)chunk * 16, address ^= (address >> 7 & 3) << 4;
        else if (mode == 3) address += (uint32_t)(row % 8) * 32 + (uint32_t)chunk * 16, address ^= (address >> 7 & 1) << 4;
        else address += (uint32_t)(row % 8) * 16 + (uint32_t)chunk * leading;
        const uint16_t* bits = (const uint16_t*)shared_pointer(address, 16, 16);
        for (int i = 0; i < 8; i++) out[(chunk * 8 + i) * stride] = from_bf16(bits[i]);
    }
}

void execute(Warpgroup& group, Operation& op) {
    Accumulator& acc = *group.accumulators[op.accumulator];
    static float b[16 * 256];
    for (int row = 0; row < op.n; row++) load_row(b + row, op.n, op.b_descriptor, row);
    if (!op.a_in_registers)
        for (int row = 0; row < 64; row++) load_row(op.a[row], 1, op.a_descriptor, row);
    if (!op.accumulate) memset(acc.value, 0, sizeof(float) * 64 * (size_t)op.n);
    multiply<64>(acc.value, op.a, b, op.n);
    if (--acc.operations > 0) return;
    for (int thread = 0; thread < 128; thread++)
        for (int j = 0; j < op.n / 2; j++)
            acc.d[thread][j] = acc.value[accumulator_row(thread, j) * op.n + accumulator_column(thread, j)];
}

void complete(Warpgroup& group, int64_t groups) {  // those numbered below `groups`
    int done = 0;
    while (done < group.num_operations && (int64_t)group.operations[done].group < groups) execute(group, group.operations[done++]);
    group.num_operations -= done;
    memmove(group.operations, group.operations + done, (size_t)group.num_operations * sizeof(Operation));
}

void start(Warpgroup& group) {
    const Operand& first = *group.operands[0];
    for (int thread = 1; thread < 128; thread++) {
        const Operand& other = *group.operands[thread];
        if (other.n != first.n || other.a_descriptor != first.a_descriptor || other.b_descriptor != first.b_descriptor || other.accumulate != first.accumulate)
            fail("wgmma: the threads of a warpgroup came with different operands");
    }
    if (group.num_operations == MAX_OPERATIONS) fail("more than %d wgmma in flight", MAX_OPERATIONS);
    Operation& op = group.operations[group.num_operations++];
    op.accumulator = find_accumulator(group, first.n);
    group.accumulators[op.accumulator]->operations++;
    op.n = first.n;
    op.accumulate = first.accumulate;
    op.a_in_registers = first.a != nullptr;
    op.group = current_fiber()->wgmma_groups;
    op.a_descriptor = first.a_descriptor;
    op.b_descriptor = first.b_descriptor;
    if (op.a_in_registers)
        for (int thread = 0; thread < 128; thread++)
            for (int i = 0; i < 8; i++) {
                int g = thread % 32 / 4, q = thread % 4, reg = i / 2;
                op.a[thread / 32 * 16 + g + 8 * (reg & 1)][2 * q + i % 2 + 8 * (reg >> 1)] =
                    from_bf16((uint16_t)(group.operands[thread]->a[reg] >> 16 * (i % 2)));
            }
    if (launch.delivery == DELIVER_EARLY) complete(group, INT64_MAX);
}

}  // namespace

void wgmma(int n, float* d, const uint32_t* a_registers, uint64_t a, uint64_t b, bool accumulate, const char* file, int line) {
    Fiber* fiber = current_fiber();
    Fiber* leader = fiber - fiber->linear % 128;
    Warpgroup& group = warpgroups[fiber->linear / 128];
    Operand operand = {d, a_registers, n, accumulate, a, b};
    group.operands[fiber->linear % 128] = &operand;
    if (++group.arrived < 128) return wait_here(WAIT_WGMMA, file, line);
    group.arrived = 0;
    start(group);
    for (int thread = 0; thread < 128; thread++)
        if (leader + thread != fiber) wake(leader + thread);
}

void wgmma_commit() { current_fiber()->wgmma_groups++; }

void wgmma_wait(int pending) {
    Fiber* fiber = current_fiber();
    complete(warpgroups[fiber->linear / 128], (int64_t)fiber->wgmma_groups - pending);
}

// ---- blocks ----------------------------------------------------------------------------------------------------------

void reset_asynchronous() {
    if (warpgroups == nullptr) warpgroups = (Warpgroup*)calloc(MAX_WARPGROUPS, sizeof(Warpgroup));
    num_in_flight = num_mbarrier_waiters = 0;
    for (int i = 0; i < MAX_WARPGROUPS; i++) {
        warpgroups[i].arrived = 0;
        warpgroups[i].num_operations = 0;
        for (int j = 0; j < warpgroups[i].num_accumulators; j++) warpgroups[i].accumulators[j]->operations = 0;
    }
}

void check_exit(Fiber* fiber) {
    if (warpgroups[fiber->linear / 128].num_operations != 0) fail("returns while wgmma are in flight");
}

const char* asynchronous_trouble() {
    static char text[128];
    if (num_in_flight == 0) return nullptr;
    snprintf(text, sizeof text, "ended with %u bulk copies in flight", num_in_flight);
    return text;
}

}  // namespace emulator
