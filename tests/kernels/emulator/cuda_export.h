// How Python calls a kernel: by name, with one pointer per argument, as the CUDA driver does. Included by cuda_emulator.h.
#pragma once

namespace emulator {

// f4 f8 (floats), i4 i8 (integers), p8 (pointers), s40 (structs): kind and size of a parameter.
template <class T>
void describe(char*& out) {
    *out++ = std::is_pointer_v<T> ? 'p' : std::is_floating_point_v<T> ? 'f' : std::is_class_v<T> ? 's' : 'i';
    if (sizeof(T) >= 100) *out++ = (char)('0' + sizeof(T) / 100);
    if (sizeof(T) >= 10) *out++ = (char)('0' + sizeof(T) / 10 % 10);
    *out++ = (char)('0' + sizeof(T) % 10);
    *out++ = ' ';
}

template <class... Parameters>
const char* signature(void (*)(Parameters...), char* out) {
    char* end = out;
    (describe<std::remove_cv_t<Parameters>>(end), ...);
    *end = 0;
    return out;
}

template <class... Parameters, size_t... I>
void invoke(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<Parameters>*>(arguments[I])...);
}

template <class... Parameters>
void invoke(void (*kernel)(Parameters...), void** arguments) {
    invoke(kernel, arguments, std::index_sequence_for<Parameters...>{});
}

}  // namespace emulator

// max_threads: of __launch_bounds__, or 0.
#define EMULATOR_EXPORT(name, max_threads)                                                                      \
    extern "C" __attribute__((visibility("default"))) void name##__invoke(void** arguments) {                   \
        emulator::invoke(name, arguments);                                                                      \
    }                                                                                                           \
    extern "C" __attribute__((visibility("default"))) const char* name##__signature() {                         \
        static char text[1024];                                                                                 \
        return emulator::signature(name, text);                                                                 \
    }                                                                                                           \
    extern "C" __attribute__((visibility("default"))) int name##__max_threads() { return (max_threads); }
