"""What a step needs to know on the device: the arrays the kernels read, and the one packed upload that refreshes them.

Per step the host sends one int32 buffer (one copy, pinned to device); kernels/step_prepare.cu, the first kernel of the
step, unpacks it into arrays at fixed addresses, so that a captured graph never changes. All of it is in stream order:
step n+1 may be uploaded while step n runs, and a slot may change hands between the two.

Slots. A running sequence owns a slot 0..max_slots-1 (max_slots = max_batch_seqs): a row of `block_tables`, its sampler
parameters and counts, `last_token` and `slot_errors`. Slot max_slots is the dummy of padding rows: all entries of its
block table are the dummy page (index num_pages, one page beyond the pool).

Rows. A step has `num_rows` token rows: decode rows first, padded to `decode_rows` (a graph's bucket; eager steps are
not padded), then the prefill items end to end. Rows that belong to nobody are padding: token 0, position 0, slot
max_slots.

Layout of the upload, in 32-bit words. Every section starts at a multiple of 4 words, records of 4 words can be read as
one int4. Header:

    0 LAYOUT_VERSION      4 num_prefill_tokens   8 decode_at    12 logits_at
    1 step (for reports)  5 num_tiles            9 items_at     13 runs_at
    2 num_decode          6 num_logits          10 tokens_at    14 pages_at
    3 num_items           7 num_runs            11 tiles_at     15 number of words in all

Sections (`x_at` is the word where section x starts):

    decode  num_decode x (slot, position, token, 0)      row i; token -1: the input is last_token[slot], which the step
                                                         before this one sampled
    items   num_items x (slot, first_row, count, first_position)   prefill: rows first_row .. first_row + count - 1
    tokens  num_prefill_tokens                           of row decode_rows + i
    tiles   num_tiles x (first_row, count)               prefill attention, as kernels/attention.py wants them
    logits  num_logits x (row, slot, num_generated, target)   rows whose logits are computed: first those that sample
                                                         (target -1), then those that only score the token `target`;
                                                         num_generated = tokens generated before this one (RNG counter)
    runs    num_runs x (slot, first_index, count, offset)   block_tables[slot][first_index + i] = pages[offset + i], and
                                                         every entry after the last of them = the dummy page. At most
                                                         one run a slot, so runs are independent of each other
    pages   page indices

step_prepare(Common, const int32_t* upload,
             int32_t* token_ids, int32_t* positions, int32_t* slots,        (num_rows,) out
             int32_t* block_tables,                                         (max_slots + 1, table_width) in, out
             int32_t* tiles,                                                (num_tiles, 2) out
             int32_t* logits_rows, int32_t* logits_slots,                   (num_logits_rows,) out
             int32_t* logits_generated, int32_t* logits_targets,            (num_logits_rows,) out
             int32_t* page_prefix,                                          (decode_rows + 1,) out
             const int32_t* last_token,                                     (max_slots + 1,) in
             int num_rows, int decode_rows, int num_logits_rows,            of the launch, padding included
             int max_slots, int table_width, int dummy_page, int window)    window 0 = none
It also clears common.slot_errors (max_slots + 1). Padding logits rows (num_logits .. num_logits_rows - 1): row =
min(r, num_rows - 1), slot max_slots, generated 0, target -1. page_prefix[0] = 0 and page_prefix[i + 1] = page_prefix[i]
+ p/128 - max(0, p - window + 1)/128 + 1 with p the position of decode row i (padding rows too: position 0, 1 page).
It trusts the upload (the host builds it) except for what would write out of bounds: a slot outside 0..max_slots, a row
outside the launch, an index outside table_width is reported (PAGE_RANGE or POSITION_RANGE, slot max_slots) and skipped.
"""

from __future__ import annotations

LAYOUT_VERSION = 1
HEADER_WORDS = 16
PENDING = -1
"""Token of a decode row whose input the step before samples, and target of a logits row that samples."""
