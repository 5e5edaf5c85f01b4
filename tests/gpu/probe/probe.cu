// Kernels that show what the device layer hands to a kernel: arguments, launch attributes, order. For tests/gpu only.
#include "common.cuh"

extern "C" __global__ void probe_arguments(const Common common, const uint64_t* address, int32_t small, int64_t large, float real, uint64_t* out) {
    begin_kernel(common);
    ptx::wait_for_previous();
    out[0] = (uint64_t)common.errors;
    out[1] = (uint64_t)common.slot_errors;
    out[2] = (uint64_t)common.trace;
    out[3] = (uint64_t)(int64_t)common.trace_index;
    out[4] = (uint64_t)(int64_t)common.layer;
    out[5] = common.op;
    out[6] = (uint64_t)address;
    out[7] = (uint64_t)(int64_t)small;
    out[8] = (uint64_t)large;
    out[9] = __float_as_uint(real);
}

// out = 3 in + 1, mod 2^32; slow on purpose (one block works for a while), so that an early start would be seen.
extern "C" __global__ void probe_chain(const Common common, const uint32_t* in, uint32_t* out, int count) {
    begin_kernel(common);
    ptx::wait_for_previous();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) out[i] = 3 * in[i] + 1;
}

// The box at row `row`, column `column` of the map, as it lies in shared memory.
extern "C" __global__ void probe_tensor_map(const Common common, const __grid_constant__ TensorMap map, uint16_t* out, int row, int column, int box_rows) {
    begin_kernel(common);
    ptx::wait_for_previous();
#if HAS_SM90
    DYNAMIC_SHARED(smem);
    __shared__ uint64_t bar;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&bar, 1);
        ptx::mbarrier_fence_init();
        ptx::mbarrier_arrive_expect(&bar, box_rows * 128);
        ptx::tma_load_2d(smem, &map, column, row, &bar);
    }
    __syncthreads();
    ptx::mbarrier_wait(&bar, 0);
    for (int i = threadIdx.x; i < box_rows * 64; i += blockDim.x) out[i] = reinterpret_cast<const uint16_t*>(smem)[i];
#endif
}

extern "C" __global__ void probe_cluster(const Common common, uint32_t* out) {
    begin_kernel(common);
    ptx::wait_for_previous();
    uint32_t size = 1;
#if HAS_SM90
    asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
#endif
    out[blockIdx.x] = size;
}

// The last word of `bytes` of dynamic shared memory.
extern "C" __global__ void probe_shared(const Common common, uint32_t* out, int bytes) {
    begin_kernel(common);
    ptx::wait_for_previous();
    DYNAMIC_SHARED(smem);
    uint32_t* words = reinterpret_cast<uint32_t*>(smem);
    for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) words[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) out[0] = words[bytes / 4 - 1];
}

// A report in each of `steps` steps, which step_prepare begins by clearing slot_errors, and a second one that must not be sent.
extern "C" __global__ void probe_report(const Common common, int slot, int steps) {
    begin_kernel(common);
    ptx::wait_for_previous();
    for (int i = 0; i < steps; i++) {
        common.slot_errors[slot] = 0;
        report_error(common, ERROR_NONFINITE, 2, slot, 100 + i, i);
        report_error(common, ERROR_NONFINITE, 2, slot, 9999, 9999);
    }
}

// Breaks the context: nothing is mapped there.
extern "C" __global__ void probe_illegal_address(const Common common) {
    begin_kernel(common);
    ptx::wait_for_previous();
    *reinterpret_cast<volatile uint32_t*>(64) = 1;
}
