// What a fiber is while it does not run: its stack pointer, with the callee-saved registers on the stack. swapcontext
// would do two system calls a switch; it is the fallback for machines other than x86-64.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace emulator {

#if defined(__x86_64__) && !defined(EMULATOR_UCONTEXT)

struct Context {
    void* stack_pointer;
};

extern "C" void emulator_switch(void** save, void* load) __attribute__((visibility("hidden")));

inline void context_switch(Context* from, Context* to) { emulator_switch(&from->stack_pointer, to->stack_pointer); }

inline void context_prepare(Context* context, uint8_t* stack, size_t bytes, void (*entry)()) {
    uint64_t* top = (uint64_t*)((uintptr_t)(stack + bytes) & ~(uintptr_t)15);
    *--top = 0;                // entry never returns
    *--top = (uint64_t)entry;  // popped by ret: then the stack pointer is 8 modulo 16, as after a call
    for (int i = 0; i < 6; i++) *--top = 0;
    context->stack_pointer = top;
}

#define EMULATOR_SWITCH_ASSEMBLY                                                                                        \
    asm(".text\n.hidden emulator_switch\n.globl emulator_switch\n.type emulator_switch,@function\nemulator_switch:\n"   \
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"                                      \
        "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"                                                                            \
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"                                       \
        ".size emulator_switch,.-emulator_switch\n");

#else
}  // namespace emulator
#include <ucontext.h>
namespace emulator {

struct Context {
    ucontext_t state;
};

inline void context_switch(Context* from, Context* to) { swapcontext(&from->state, &to->state); }

inline void context_prepare(Context* context, uint8_t* stack, size_t bytes, void (*entry)()) {
    getcontext(&context->state);
    context->state.uc_stack.ss_sp = stack;
    context->state.uc_stack.ss_size = bytes;
    context->state.uc_link = nullptr;
    makecontext(&context->state, entry, 0);
}

#define EMULATOR_SWITCH_ASSEMBLY

#endif

}  // namespace emulator
