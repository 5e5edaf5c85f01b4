// Errors of emulated code: what is said, and the way out of the fibers.
#include "internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

namespace emulator {

bool failed;
char message[8192];

const char* name_of(Wait wait) {
    static const char* const names[] = {"nothing", "__syncwarp", "a shuffle", "a vote", "__match", "__reduce", "ldmatrix",
                                        "mma", "a barrier", "an mbarrier", "a cluster barrier", "wgmma", "wait_for_previous"};
    return names[wait];
}

namespace {

[[noreturn]] void leave(const char* text) {
    snprintf(message, sizeof message, "%s", text);
    failed = true;
    leave_fibers();
    __builtin_unreachable();
}

void describe_wait(const Fiber& fiber, char* out, size_t size) {
    char what[400];
    snprintf(what, sizeof what, "%s", name_of(fiber.wait));
    if (fiber.wait == WAIT_BARRIER) {
        const Barrier& barrier = block_of(&fiber)->barriers[fiber.barrier];
        snprintf(what, sizeof what, "%s, barrier %d, %u of %u threads there", fiber.barrier_threads ? "named_barrier" : "__syncthreads",
                 fiber.barrier, barrier.arrived, fiber.barrier_threads ? barrier.expected : block_of(&fiber)->num_live);
    }
    if (fiber.wait == WAIT_MBARRIER) mbarrier_describe(fiber, what, sizeof what);
    for (int i = 0; i < fiber.warp->meetings; i++) {
        const Warp::Meeting& meeting = fiber.warp->meeting[i];
        if (fiber.wait == meeting.kind && meeting.arrived >> fiber.lane & 1)
            snprintf(what, sizeof what, "%s, mask %08x, lanes there %08x", name_of(fiber.wait), meeting.mask, meeting.arrived);
    }
    const char* slash = fiber.file ? strrchr(fiber.file, '/') : nullptr;
    snprintf(out, size, "%s (%s:%d)", what, slash ? slash + 1 : fiber.file, fiber.line);
}

// One line for each run of threads that wait at the same.
int describe_block(const BlockState& block, uint32_t num_threads, char* out, int size) {
    char line[512] = "", next[512];
    int used = 0;
    for (uint32_t first = 0, i = 0; i <= num_threads && used < size - 600; i++) {
        next[0] = 0;
        if (i < num_threads && !block.fibers[i].exited) describe_wait(block.fibers[i], next, sizeof next);
        if (i < num_threads && strcmp(line, next) == 0) continue;
        if (line[0]) used += snprintf(out + used, (size_t)(size - used), "\n  threads %u-%u wait at %s", first, i - 1, line);
        first = i;
        strcpy(line, next);
    }
    if (block.num_live < num_threads) used += snprintf(out + used, (size_t)(size - used), "\n  %u threads have returned", num_threads - block.num_live);
    return used;
}

}  // namespace

void deadlock() {
    static char text[sizeof message];
    int used = 0, size = sizeof text;
    for (uint32_t rank = 0; rank < launch.cluster && used < size - 1000; rank++) {
        const BlockState& block = blocks[rank];
        const uint3& i = block.index;
        used += snprintf(text + used, (size_t)(size - used), "%s block (%u, %u, %u): no thread can go on", rank ? "\nand in" : "deadlock in", i.x, i.y, i.z);
        used += describe_block(block, block.size.x * block.size.y * block.size.z, text + used, size - used);
    }
    leave(text);
}

void fail(const char* format, ...) {
    static char text[4096];
    const uint3 &b = current->block->index, &t = current->index;
    int used = snprintf(text, sizeof text, "block (%u, %u, %u), thread (%u, %u, %u): ", b.x, b.y, b.z, t.x, t.y, t.z);
    va_list list;
    va_start(list, format);
    vsnprintf(text + used, sizeof text - (size_t)used, format, list);
    va_end(list);
    leave(text);
}

}  // namespace emulator

// ---- -fsanitize=alignment,bounds: what GCC calls; the layouts are those of its libubsan (ubsan_handlers.h)

namespace {

struct Site {
    const char* file;
    uint32_t line, column;
};
struct Type {
    uint16_t kind, info;
    char name[];
};
struct Mismatch {
    Site site;
    const Type* type;
    uint8_t log_alignment, check;
};
struct OutOfBounds {
    Site site;
    const Type *array, *index;
};

}  // namespace

extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(Mismatch* what, uintptr_t pointer) {
    emulator::fail("misaligned access: %s at %#zx, which is not aligned to %d bytes (%s:%u)", what->type->name, pointer,
                   1 << what->log_alignment, what->site.file, what->site.line);
}

extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_out_of_bounds(OutOfBounds* what, uintptr_t index) {
    emulator::fail("index %lld of an array of type %s (%s:%u)", (long long)index, what->array->name, what->site.file, what->site.line);
}
