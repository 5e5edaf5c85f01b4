// The arithmetic of the tensor cores: mma.sync and wgmma. Both add k ascending in double and round once, so that both give
// the same bits for the same operands (not the hardware's bits).
#include "internal.h"

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

// ---- wgmma -----------------------------------------------------------------------------------------------------------

namespace {

constexpr uint32_t MAX_WARPGROUPS = MAX_CLUSTER * MAX_THREADS / 128;
constexpr int MAX_OPERATIONS = 64;

struct Operand {
    float* d;
    const uint32_t* a;
    int n;
    bool accumulate;
    uint64_t a_descriptor, b_descriptor;
    bool b_transposed;
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
    bool accumulate, a_in_registers, b_transposed;
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

// 16 rows of 64 columns of an N-major operand in 128-byte swizzle: atoms of 8 rows.
void load_transposed(float* out, uint64_t descriptor) {
    uint32_t start = (uint32_t)(descriptor & 0x3FFF) << 4, atoms = (uint32_t)(descriptor >> 32 & 0x3FFF) << 4;
    if (descriptor >> 62 != 1) fail("wgmma_transposed: only the 128-byte swizzle is emulated");
    for (int k = 0; k < 16; k++)
        for (int chunk = 0; chunk < 8; chunk++) {
            uint32_t address = start + (uint32_t)(k / 8) * atoms + (uint32_t)(k % 8) * 128 + (uint32_t)chunk * 16;
            const uint16_t* bits = (const uint16_t*)shared_pointer(address ^ (address >> 7 & 7) << 4, 16, 16);
            for (int i = 0; i < 8; i++) out[k * 64 + chunk * 8 + i] = from_bf16(bits[i]);
        }
}

void execute(Warpgroup& group, Operation& op) {
    Accumulator& acc = *group.accumulators[op.accumulator];
    static float b[16 * 256];
    if (op.b_transposed) load_transposed(b, op.b_descriptor);
    else
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
    op.b_transposed = first.b_transposed;
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

void wgmma(int n, float* d, const uint32_t* a_registers, uint64_t a, uint64_t b, bool accumulate, const char* file, int line, bool b_transposed) {
    Fiber* fiber = current_fiber();
    Fiber* leader = fiber - fiber->linear % 128;
    if (fiber->linear / 128 * 128 + 128 > fiber->block->size.x * fiber->block->size.y * fiber->block->size.z) fail("wgmma of an incomplete warpgroup");
    if (!fiber->wgmma_fenced) fail("wgmma without wgmma_fence since the last wgmma_wait<0> (%s:%d)", file, line);
    Warpgroup& group = warpgroups[number_of(fiber) / 128];
    Operand operand = {d, a_registers, n, accumulate, a, b, b_transposed};
    group.operands[fiber->linear % 128] = &operand;
    if (++group.arrived < 128) return wait_here(WAIT_WGMMA, file, line);
    group.arrived = 0;
    start(group);
    for (int thread = 0; thread < 128; thread++)
        if (leader + thread != fiber) wake(leader + thread);
}

void wgmma_fence() { current_fiber()->wgmma_fenced = true; }

void wgmma_commit() { current_fiber()->wgmma_groups++; }

void wgmma_wait(int pending) {
    Fiber* fiber = current_fiber();
    complete(warpgroups[number_of(fiber) / 128], (int64_t)fiber->wgmma_groups - pending);
    if (pending == 0) fiber->wgmma_fenced = false;  // the kernel may write its accumulators now
}

void reset_tensor_cores() {
    if (warpgroups == nullptr) warpgroups = (Warpgroup*)calloc(MAX_WARPGROUPS, sizeof(Warpgroup));
    for (uint32_t i = 0; i < MAX_WARPGROUPS; i++) {
        warpgroups[i].arrived = 0;
        warpgroups[i].num_operations = 0;
        for (int j = 0; j < warpgroups[i].num_accumulators; j++) warpgroups[i].accumulators[j]->operations = 0;
    }
}

void check_wgmma_of(Fiber* fiber) {
    if (warpgroups[number_of(fiber) / 128].num_operations != 0) fail("returns while wgmma are in flight");
}

}  // namespace emulator
