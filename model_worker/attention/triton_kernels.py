"""The Triton kernels of paged attention: store rows, attend by tiles, merge partial results.

Owns the arithmetic on the device and nothing of what is to be done: items, rows and tables come
from ``model_worker.attention.work_plan``, in device memory, counts included, so that a captured
launch serves any step. Softmax is online, in float32 and base 2 (Milakov and Gimelshein, 2018; Dao
et al., FlashAttention, 2022); partial results are merged by log-sum-exp.

Pool tensors are (blocks, block_size, kv_heads, head_dim) in any memory order in which a slot
(block x block_size + row) has one stride and a row's elements are consecutive. Their rows are read
only below an item's kv_stop: what was never written is never loaded.

Annotations are evaluated here: Triton tells ``tl.constexpr`` by its type.
"""

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)
"""1.5 x 2^23: adding and subtracting it rounds a small float32 half to even."""


@triton.jit
def store_rows(
    key: tl.tensor,  # (tokens, kv_heads, head_dim) by its strides
    value: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    key_scales: tl.tensor,  # float32 (slots, kv_heads) by the scale strides; with IS_INT8
    value_scales: tl.tensor,
    slots: tl.tensor,  # int64 (tokens,); a negative one stores nothing
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    scale_slot_stride: tl.tensor,
    scale_head_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """One program a token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head = tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    is_head = (head < KV_HEADS) & (slot >= 0)
    is_used = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    at_key = token * key_token_stride + head[:, None] * key_head_stride + dim[None, :]
    at_value = token * value_token_stride + head[:, None] * value_head_stride + dim[None, :]
    target = slot * slot_stride + head.to(tl.int64)[:, None] * head_stride + dim[None, :]
    keys = tl.load(key + at_key, mask=is_used, other=0.0)
    values = tl.load(value + at_value, mask=is_used, other=0.0)
    if IS_INT8:
        at_scale = slot * scale_slot_stride + head.to(tl.int64) * scale_head_stride
        keys, key_scale = _quantize(keys)
        values, value_scale = _quantize(values)
        tl.store(key_scales + at_scale, key_scale, mask=is_head)
        tl.store(value_scales + at_scale, value_scale, mask=is_head)
    tl.store(key_pool + target, keys, mask=is_used)
    tl.store(value_pool + target, values, mask=is_used)


@triton.jit
def _quantize(rows):
    """int8 and float32 scales of rows (heads, dim), as ``kv_store.quantize`` does it."""
    numbers = rows.to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(numbers), 1), 127.0)
    step = tl.where(scale == 0.0, 1.0, scale)
    quotient = tl.div_rn(numbers, tl.broadcast_to(step[:, None], numbers.shape))
    return ((quotient + ROUND) - ROUND).to(tl.int8), scale


@triton.jit
def attend_tiles(
    query: tl.tensor,  # (tokens, heads, head_dim) by its strides
    output: tl.tensor,  # (tokens, heads, head_dim), contiguous
    part_outputs: tl.tensor,  # float32 (parts, heads, head_dim)
    part_sums: tl.tensor,  # float32 (parts, heads): log2 of the sum of exponentials
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    num_items: tl.tensor,  # int32 (1,)
    items: tl.tensor,  # int32 (items, 8), see work_plan.ITEM_FIELDS
    query_rows: tl.tensor,
    row_limits: tl.tensor,
    tables: tl.tensor,
    scale: tl.tensor,  # of the scores, times log2(e)
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    scale_slot_stride: tl.tensor,
    scale_head_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one kv head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # query rows x GROUP
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """A unit is an item for one kv head; programs take units in turn until all are done."""
    lane = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < HEAD_DIM
    num_units = tl.load(num_items) * KV_HEADS
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        item = items + (unit // KV_HEADS) * 8
        kv_head = unit % KV_HEADS
        rows_start = tl.load(item)
        num_rows = tl.load(item + 1)
        table = tables + tl.load(item + 2)
        kv_start = tl.load(item + 3)
        full_stop = tl.load(item + 4)
        kv_stop = tl.load(item + 5)
        part_start = tl.load(item + 6)
        row = lane // GROUP
        is_row = row < num_rows
        token = tl.load(query_rows + rows_start + row, mask=is_row, other=0)
        limit = tl.load(row_limits + token, mask=is_row, other=0)
        head = kv_head * GROUP + lane % GROUP
        is_used = is_row[:, None] & is_dim[None, :]
        at_query = token.to(tl.int64) * query_token_stride + head * query_head_stride
        queries = tl.load(query + at_query[:, None] + dim[None, :], mask=is_used, other=0.0)
        at_head = kv_head.to(tl.int64) * head_stride
        at_scale = kv_head.to(tl.int64) * scale_head_stride
        total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_M], tl.float32)
        for start in range(kv_start, full_stop, BLOCK_N):
            total, best, weight = _add_tile(
                total, best, weight, queries, table, start, kv_stop, limit, dim, is_dim,
                key_pool + at_head, value_pool + at_head,
                key_scales, value_scales, at_scale, scale, slot_stride, scale_slot_stride,
                HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, PRECISION, IS_INT8, False,
            )  # fmt: skip
        for start in range(full_stop, kv_stop, BLOCK_N):
            total, best, weight = _add_tile(
                total, best, weight, queries, table, start, kv_stop, limit, dim, is_dim,
                key_pool + at_head, value_pool + at_head,
                key_scales, value_scales, at_scale, scale, slot_stride, scale_slot_stride,
                HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, PRECISION, IS_INT8, True,
            )  # fmt: skip
        is_empty = weight == 0.0
        result = total / tl.where(is_empty, 1.0, weight)[:, None]
        if part_start < 0:
            at_output = (token.to(tl.int64) * (KV_HEADS * GROUP) + head) * HEAD_DIM
            target = output + at_output[:, None] + dim[None, :]
            tl.store(target, result.to(output.dtype.element_ty), mask=is_used)
        else:
            at_part = (part_start + row).to(tl.int64) * (KV_HEADS * GROUP) + head
            tl.store(
                part_outputs + at_part[:, None] * HEAD_DIM + dim[None, :], result, mask=is_used
            )
            sums = tl.where(
                is_empty, float("-inf"), best + tl.log2(tl.where(is_empty, 1.0, weight))
            )
            tl.store(part_sums + at_part, sums, mask=is_row)


@triton.jit
def _add_tile(
    total, best, weight, queries, table, start, kv_stop, limit, dim, is_dim,
    keys, values, key_scales, value_scales, at_scale, scale, slot_stride, scale_slot_stride,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, IS_INT8: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Add BLOCK_N tokens of KV to (weighted values, maximum, sum of weights)."""
    position = start + tl.arange(0, BLOCK_N)
    if IS_MASKED:
        is_token = position < kv_stop
        block = tl.load(table + position // BLOCK_SIZE, mask=is_token, other=0)
    else:
        block = tl.load(table + position // BLOCK_SIZE)
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    at_row = slot[:, None] * slot_stride + dim[None, :]
    if IS_MASKED:
        is_used = is_token[:, None] & is_dim[None, :]
        key = tl.load(keys + at_row, mask=is_used, other=0.0)
    elif HEAD_DIM != BLOCK_D:
        key = tl.load(keys + at_row, mask=is_dim[None, :], other=0.0)
    else:
        key = tl.load(keys + at_row)
    if IS_INT8:
        # A number of eight bits is exact in every type of query; its scale is applied to the score.
        key = key.to(queries.dtype)
    scores = tl.dot(queries, tl.trans(key), input_precision=PRECISION) * scale
    if IS_INT8:
        at_scales = at_scale + slot * scale_slot_stride
        if IS_MASKED:
            scores *= tl.load(key_scales + at_scales, mask=is_token, other=0.0)[None, :]
        else:
            scores *= tl.load(key_scales + at_scales)[None, :]
    if IS_MASKED:
        is_seen = is_token[None, :] & (position[None, :] < limit[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    # Rows that have seen nothing yet keep -inf; 0 in its place keeps inf - inf out.
    anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - anchor[:, None])
    decay = tl.exp2(best - anchor)
    weight = weight * decay + tl.sum(weights, 1)
    if IS_MASKED:
        value = tl.load(values + at_row, mask=is_used, other=0.0)
    elif HEAD_DIM != BLOCK_D:
        value = tl.load(values + at_row, mask=is_dim[None, :], other=0.0)
    else:
        value = tl.load(values + at_row)
    if IS_INT8:
        if IS_MASKED:
            weights *= tl.load(value_scales + at_scales, mask=is_token, other=0.0)[None, :]
        else:
            weights *= tl.load(value_scales + at_scales)[None, :]
        value = value.to(queries.dtype)
    total = tl.dot(
        weights.to(value.dtype), value, total * decay[:, None], input_precision=PRECISION
    )
    return total, new_best, weight


@triton.jit
def merge_parts(
    output: tl.tensor,  # (tokens, heads, head_dim), contiguous
    part_outputs: tl.tensor,
    part_sums: tl.tensor,
    num_rows: tl.tensor,  # int32 (1,)
    part_starts: tl.tensor,  # int32 (tokens + 1,)
    part_ids: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program a token and head. A token without parts has its result already."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    if token < tl.load(num_rows):
        begin = tl.load(part_starts + token)
        end = tl.load(part_starts + token + 1)
        if begin < end:
            dim = tl.arange(0, BLOCK_D)
            is_dim = dim < HEAD_DIM
            total = tl.zeros([BLOCK_D], tl.float32)
            best = tl.full([], float("-inf"), tl.float32)
            weight = tl.full([], 0.0, tl.float32)
            for start in range(begin, end, BLOCK_P):
                place = start + tl.arange(0, BLOCK_P)
                is_part = place < end
                part = tl.load(part_ids + place, mask=is_part, other=0)
                at_part = part.to(tl.int64) * HEADS + head
                sums = tl.load(part_sums + at_part, mask=is_part, other=float("-inf"))
                outputs = tl.load(
                    part_outputs + at_part[:, None] * HEAD_DIM + dim[None, :],
                    mask=is_part[:, None] & is_dim[None, :],
                    other=0.0,
                )
                new_best = tl.maximum(best, tl.max(sums, 0))
                anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
                weights = tl.exp2(sums - anchor)
                decay = tl.exp2(best - anchor)
                total = total * decay + tl.sum(weights[:, None] * outputs, 0)
                weight = weight * decay + tl.sum(weights, 0)
                best = new_best
            at_output = (token.to(tl.int64) * HEADS + head) * HEAD_DIM
            result = (total / weight).to(output.dtype.element_ty)
            tl.store(output + at_output + dim, result, mask=is_dim)
