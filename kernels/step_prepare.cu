// The first kernel of a step: unpacks the host's one upload into the arrays all other kernels read.
//
// The layout of the upload and what each array holds is stated in engine/cuda/step_state.py. One block, so that clearing
// slot_errors, the block tables and the rows that read them need only barriers. Nothing here depends on other rows of the
// batch but page_prefix, which is about their lengths.
//
// What later kernels index with is checked here, once: a row whose slot, position or token cannot be is reported against
// its slot and becomes a padding row, so no later kernel can leave its arrays. Entries of block_tables are only ever
// written here, so all of them are in 0..dummy_page.
//
// Launch: grid 1, block a multiple of 32 up to 1024.
#include "common.cuh"

namespace {



struct Arrays {  // the kernel's parameters, for the functions below
    const int32_t* upload;
    int32_t *token_ids, *positions, *slots, *block_tables, *tiles, *logits_rows, *descriptors, *page_prefix;
    const int32_t* last_token;
    int num_rows, decode_rows, num_logits_rows, max_slots, table_width, dummy_page, vocab, window;
};

__device__ __forceinline__ int4 record(const int32_t* upload, int at, int index) {
    return reinterpret_cast<const int4*>(upload + at)[index];
}

// One warp a run: the pages of one slot from an index on, dummy pages after the last.
__device__ void apply_run(const Common& common, const Arrays& a, int4 run, int pages_at, int lane) {
    int slot = run.x, first = run.y, count = run.z;
    if (slot < 0 || slot >= a.max_slots || first < 0 || count < 0 || first > a.table_width - count) {
        if (lane == 0) report_error(common, ERROR_POSITION_RANGE, -1, a.max_slots, first, slot);
        return;
    }
    int32_t* table = a.block_tables + (int64_t)slot * a.table_width;
    for (int i = lane; i < a.table_width - first; i += 32) {
        int page = i < count ? a.upload[pages_at + run.w + i] : a.dummy_page;
        if (page < 0 || page > a.dummy_page) {
            report_error(common, ERROR_PAGE_RANGE, -1, slot, (first + i) * PAGE_TOKENS, page);
            page = a.dummy_page;
        }
        table[first + i] = page;
    }
}

__device__ __forceinline__ void write_row(const Arrays& a, int row, int slot, int position, int token) {
    a.slots[row] = slot;
    a.positions[row] = position;
    a.token_ids[row] = token;
}

// Is this row one that later kernels may index with? Reports it otherwise.
__device__ bool row_is_valid(const Common& common, const Arrays& a, int slot, int position, int token) {
    if (slot < 0 || slot > a.max_slots) {
        report_error(common, ERROR_PAGE_RANGE, -1, a.max_slots, position, slot);
        return false;
    }
    if (position < 0 || position >= a.table_width * PAGE_TOKENS) {
        report_error(common, ERROR_POSITION_RANGE, -1, slot, position, position);
        return false;
    }
    if (token < 0 || token >= a.vocab) {
        report_error(common, ERROR_TOKEN_RANGE, -1, slot, position, token);
        return false;
    }
    return true;
}

// Decode row `row` (padding beyond num_decode). Returns the number of pages it sees.
__device__ int decode_row(const Common& common, const Arrays& a, int row, int num_decode, int decode_at) {
    int slot = a.max_slots, position = 0, token = 0;
    if (row < num_decode) {
        int4 wanted = record(a.upload, decode_at, row);
        slot = wanted.x, position = wanted.y, token = wanted.z;
        if (token < 0 && slot >= 0 && slot <= a.max_slots) token = a.last_token[slot];
        if (!row_is_valid(common, a, slot, position, token)) slot = a.max_slots, position = 0, token = 0;
    }
    write_row(a, row, slot, position, token);
    int first = a.window > 0 ? max(0, position - a.window + 1) : 0;
    return position / PAGE_TOKENS - first / PAGE_TOKENS + 1;
}

// All decode rows, and the prefix sums of their pages: a scan of warps, of the warps' sums, and a carry from one round of
// the block to the next.
__device__ void prepare_decode_rows(const Common& common, const Arrays& a, int num_decode, int decode_at) {
    __shared__ int warp_sums[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    int carry = 0;
    for (int base = 0; base < a.decode_rows; base += blockDim.x) {
        int row = base + threadIdx.x;
        int sum = row < a.decode_rows ? decode_row(common, a, row, num_decode, decode_at) : 0;
        for (int step = 1; step < 32; step *= 2) {
            int below = __shfl_up_sync(0xFFFFFFFFu, sum, step);
            if (lane >= step) sum += below;
        }
        if (lane == 31) warp_sums[warp] = sum;
        __syncthreads();
        int before = carry;
        for (int w = 0; w < warps; w++) {
            if (w < warp) before += warp_sums[w];
            carry += warp_sums[w];
        }
        if (row < a.decode_rows) a.page_prefix[row + 1] = before + sum;
        __syncthreads();
    }
    if (threadIdx.x == 0) a.page_prefix[0] = 0;
}

// One warp a prefill item: consecutive positions of one sequence.
__device__ void prefill_item(const Common& common, const Arrays& a, int4 item, int tokens_at, int lane) {
    int slot = item.x, first_row = item.y, count = item.z;
    if (first_row < a.decode_rows || count < 0 || first_row > a.num_rows - count) {
        if (lane == 0) report_error(common, ERROR_PAGE_RANGE, -1, a.max_slots, item.w, first_row);
        return;
    }
    for (int i = lane; i < count; i += 32) {
        int row = first_row + i, position = item.w + i, token = a.upload[tokens_at + row - a.decode_rows];
        if (row_is_valid(common, a, slot, position, token)) write_row(a, row, slot, position, token);
    }
}

// The row of x that logits row r is made of, and what the sampler does with it (sampler_state.cuh:RowDescriptor).
__device__ void logits_row(const Common& common, const Arrays& a, int r, int num_logits, int logits_at) {
    int4 wanted = make_int4(min(r, a.num_rows - 1), a.max_slots, 0, -1);
    int mode = 0;  // padding
    if (r < num_logits) {
        int4 given = record(a.upload, logits_at, r);
        if (given.x < 0 || given.x >= a.num_rows || given.y < 0 || given.y > a.max_slots)
            report_error(common, ERROR_PAGE_RANGE, -1, a.max_slots, given.x, given.y);
        else
            wanted = given, mode = given.w < 0 ? 1 : 2;  // ROW_SAMPLE, ROW_SCORE
    }
    a.logits_rows[r] = wanted.x;
    int32_t* descriptor = a.descriptors + 5 * r;
    descriptor[0] = wanted.y;
    descriptor[1] = wanted.z;
    descriptor[2] = mode;
    descriptor[3] = wanted.w;
    descriptor[4] = a.positions[wanted.x] + 1;
}

}  // namespace

// Shapes and meaning: engine/cuda/step_state.py. `vocab`: token ids are 0..vocab-1. `window`: 0 = none.
extern "C" __global__ void __launch_bounds__(1024)
step_prepare(const Common common, const int32_t* upload, int32_t* token_ids, int32_t* positions, int32_t* slots,
             int32_t* block_tables, int32_t* tiles, int32_t* logits_rows, int32_t* descriptors, int32_t* page_prefix,
             const int32_t* last_token,
             int num_rows, int decode_rows, int num_logits_rows, int max_slots, int table_width, int dummy_page,
             int window, int vocab) {
    begin_kernel(common);
    ptx::wait_for_previous();
    const Arrays a = {upload, token_ids, positions, slots, block_tables, tiles, logits_rows, descriptors, page_prefix,
                      last_token, num_rows, decode_rows, num_logits_rows, max_slots, table_width, dummy_page, vocab, window};
    int thread = threadIdx.x, threads = blockDim.x, lane = thread & 31, warp = thread >> 5, warps = threads >> 5;
    int4 counts = record(upload, 0, 0), counts2 = record(upload, 0, 1), at = record(upload, 0, 2), at2 = record(upload, 0, 3);
    int num_decode = min(counts.z, a.decode_rows), num_items = counts.w, num_tiles = counts2.y, num_logits = counts2.z;
    int num_runs = counts2.w, pages_at = at2.z;

    for (int i = thread; i <= max_slots; i += threads) common.slot_errors[i] = 0;
    for (int row = a.decode_rows + thread; row < num_rows; row += threads) write_row(a, row, max_slots, 0, 0);
    __syncthreads();  // before errors are reported and prefill items overwrite padding
    for (int i = warp; i < num_runs; i += warps) apply_run(common, a, record(upload, at2.y, i), pages_at, lane);
    for (int i = warp; i < num_items; i += warps) prefill_item(common, a, record(upload, at.y, i), at.z, lane);
    for (int i = thread; i < 2 * num_tiles; i += threads) tiles[i] = upload[at.w + i];
    prepare_decode_rows(common, a, num_decode, at.x);
    __syncthreads();  // all positions are written
    for (int r = thread; r < num_logits_rows; r += threads) logits_row(common, a, r, num_logits, at2.x);
}
