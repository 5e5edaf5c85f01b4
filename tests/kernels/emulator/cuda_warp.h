// Where the threads of a warp or a block meet. Included by cuda_emulator.h.
#pragma once

// ---- blocks
inline void __syncthreads(EMULATOR_SITE) { emulator::barrier_sync(0, 0, false, file, line); }
inline int __syncthreads_count(int predicate, EMULATOR_SITE) { return (int)emulator::barrier_sync(0, 0, predicate != 0, file, line); }
inline int __syncthreads_or(int predicate, EMULATOR_SITE) { return emulator::barrier_sync(0, 0, predicate != 0, file, line) != 0; }
inline int __syncthreads_and(int predicate, EMULATOR_SITE) { return emulator::barrier_sync(0, 0, predicate == 0, file, line) == 0; }

// ---- warps
inline void __syncwarp(unsigned mask = 0xFFFFFFFF, EMULATOR_SITE) {
    if (emulator::warp_arrive(emulator::WAIT_SYNCWARP, mask, nullptr, file, line)) emulator::warp_release(mask);
}

// A lane whose source is outside `mask` gets an undefined value on the device: poison here.
template <class T>
inline T emulator_shuffle(unsigned mask, T value, int source, const char* file, int line) {
    static_assert(sizeof(T) <= 8);
    struct Operand {
        T value, result;
        int source;
    } operand = {value, value, source};
    emulator::warp_collective(emulator::WAIT_SHUFFLE, mask, operand, file, line, [mask](Operand** lanes) {
        for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
            Operand* lane = lanes[__builtin_ctz(rest)];
            if (mask >> lane->source & 1) lane->result = lanes[lane->source]->value;
            else memset(static_cast<void*>(&lane->result), 0xFF, sizeof lane->result);
        }
    });
    return operand.result;
}
inline int emulator_segment(int width) { return (int)emulator::current->lane & ~(width - 1); }

#define EMULATOR_SHUFFLES(type)                                                                                       \
    inline type __shfl_sync(unsigned mask, type value, int source, int width = 32, EMULATOR_SITE) {                   \
        return emulator_shuffle(mask, value, emulator_segment(width) + (source & (width - 1)), file, line);           \
    }                                                                                                                 \
    inline type __shfl_xor_sync(unsigned mask, type value, int lane_mask, int width = 32, EMULATOR_SITE) {            \
        int lane = (int)emulator::current->lane, source = lane ^ lane_mask;                                           \
        return emulator_shuffle(mask, value, source < emulator_segment(width) + width ? source : lane, file, line);   \
    }                                                                                                                 \
    inline type __shfl_up_sync(unsigned mask, type value, unsigned delta, int width = 32, EMULATOR_SITE) {            \
        int lane = (int)emulator::current->lane, source = lane - (int)delta;                                          \
        return emulator_shuffle(mask, value, source >= emulator_segment(width) ? source : lane, file, line);          \
    }                                                                                                                 \
    inline type __shfl_down_sync(unsigned mask, type value, unsigned delta, int width = 32, EMULATOR_SITE) {          \
        int lane = (int)emulator::current->lane, source = lane + (int)delta;                                          \
        return emulator_shuffle(mask, value, source < emulator_segment(width) + width ? source : lane, file, line);   \
    }
EMULATOR_SHUFFLES(int)
EMULATOR_SHUFFLES(unsigned)
EMULATOR_SHUFFLES(long)
EMULATOR_SHUFFLES(unsigned long)
EMULATOR_SHUFFLES(long long)
EMULATOR_SHUFFLES(unsigned long long)
EMULATOR_SHUFFLES(float)
EMULATOR_SHUFFLES(double)
EMULATOR_SHUFFLES(__nv_bfloat16)
EMULATOR_SHUFFLES(__nv_bfloat162)
EMULATOR_SHUFFLES(__half)
#undef EMULATOR_SHUFFLES

inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_SITE) {
    struct Operand {
        bool predicate;
        unsigned result;
    } operand = {predicate != 0, 0};
    emulator::warp_collective(emulator::WAIT_VOTE, mask, operand, file, line, [mask](Operand** lanes) {
        unsigned result = 0;
        for (unsigned rest = mask; rest != 0; rest &= rest - 1)
            if (lanes[__builtin_ctz(rest)]->predicate) result |= rest & -rest;
        for (unsigned rest = mask; rest != 0; rest &= rest - 1) lanes[__builtin_ctz(rest)]->result = result;
    });
    return operand.result;
}
inline int __any_sync(unsigned mask, int predicate, EMULATOR_SITE) { return __ballot_sync(mask, predicate, file, line) != 0; }
inline int __all_sync(unsigned mask, int predicate, EMULATOR_SITE) { return __ballot_sync(mask, predicate, file, line) == mask; }
// The lanes that have not returned: which of them are converged is not defined on the device either.
inline unsigned __activemask() { return emulator::current->warp->lanes & ~emulator::current->warp->exited; }

template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, EMULATOR_SITE) {
    struct Operand {
        T value;
        unsigned result;
    } operand = {value, 0};
    emulator::warp_collective(emulator::WAIT_MATCH, mask, operand, file, line, [mask](Operand** lanes) {
        for (unsigned i = mask; i != 0; i &= i - 1)
            for (unsigned j = mask; j != 0; j &= j - 1)
                if (memcmp(&lanes[__builtin_ctz(i)]->value, &lanes[__builtin_ctz(j)]->value, sizeof(T)) == 0)
                    lanes[__builtin_ctz(i)]->result |= j & -j;
    });
    return operand.result;
}
template <class T>
inline unsigned __match_all_sync(unsigned mask, T value, int* predicate, EMULATOR_SITE) {
    unsigned same = __match_any_sync(mask, value, file, line);
    *predicate = same == mask;
    return *predicate ? mask : 0;
}

template <class T, class Combine>
inline T emulator_reduce(unsigned mask, T value, const char* file, int line, Combine combine) {
    struct Operand {
        T value, result;
    } operand = {value, value};
    emulator::warp_collective(emulator::WAIT_REDUCE, mask, operand, file, line, [mask, combine](Operand** lanes) {
        T result = lanes[__builtin_ctz(mask)]->value;
        for (unsigned rest = mask & (mask - 1); rest != 0; rest &= rest - 1) result = combine(result, lanes[__builtin_ctz(rest)]->value);
        for (unsigned rest = mask; rest != 0; rest &= rest - 1) lanes[__builtin_ctz(rest)]->result = result;
    });
    return operand.result;
}
#define EMULATOR_REDUCE(name, type, expression)                                                         \
    inline type name(unsigned mask, type value, EMULATOR_SITE) {                                        \
        return emulator_reduce(mask, value, file, line, [](type a, type b) -> type { return expression; }); \
    }
EMULATOR_REDUCE(__reduce_add_sync, unsigned, a + b)
EMULATOR_REDUCE(__reduce_add_sync, int, a + b)
EMULATOR_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
EMULATOR_REDUCE(__reduce_min_sync, int, a < b ? a : b)
EMULATOR_REDUCE(__reduce_max_sync, unsigned, a < b ? b : a)
EMULATOR_REDUCE(__reduce_max_sync, int, a < b ? b : a)
EMULATOR_REDUCE(__reduce_and_sync, unsigned, a & b)
EMULATOR_REDUCE(__reduce_or_sync, unsigned, a | b)
EMULATOR_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
#undef EMULATOR_REDUCE
