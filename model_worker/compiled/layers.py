"""All decoder layers of a Llama-like model in one call.

RMSNorm, rotary embedding by halves, grouped-query attention over the paged pool, SwiGLU: the shape
that Llama brought and many models share. One call per step instead of some forty per layer, since
with few tokens the calls cost as much as the arithmetic.

Knows arrays only. The weights of all layers lie in one array per kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from model_worker.compiled.attention import attend
from model_worker.compiled.elementwise import FEW_ROWS, gate, rms_norm, rotate_row
from model_worker.compiled.jit import kernel
from model_worker.compiled.linear import linear

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Rows = NDArray[Any]  # float32 or int8


@kernel()
def run_layers(
    hidden: Floats,
    cosines: Floats,
    sines: Floats,
    slots: Ints,
    weights: tuple[Any, ...],
    pool: tuple[Any, ...],
    plan: tuple[Any, ...],
    scratch: tuple[Any, ...],
    epsilon: np.float32,
    scaling: np.float32,
) -> None:
    """Turn ``hidden`` (rows, width), the embeddings, into the last layer's output, in place, and
    store each row's K and V in ``slots`` (rows,).

    ``cosines`` and ``sines`` (rows, head_dim). ``weights``: LayerWeights' arrays in its order;
    ``pool``: keys, values (layers, kv_heads, slots, head_dim), key and value scales (layers,
    kv_heads, slots) or of no size; ``plan``: an AttentionPlan's arrays in its order; ``scratch``:
    ``StepScratch.arrays`` for these rows.
    """
    qkv, qkv_scale, qkv_bias, out, out_scale, out_bias, gate_up, gate_up_scale = weights[:8]
    down, down_scale, down_bias, norm_in, norm_post, query_norm, key_norm = weights[8:]
    keys, values, key_scales, value_scales = pool
    items, rows, limits, row_starts, row_entries = plan
    num_rows, num_layers = hidden.shape[0], keys.shape[0]
    normed, projected, projected_heads, query, attended, gated, activated = scratch
    no_bias = np.zeros(gated.shape[1], np.float32)
    for layer in range(num_layers):
        rms_norm(hidden, norm_in[layer], epsilon, normed)
        linear(normed, qkv[layer], qkv_scale[layer], qkv_bias[layer], projected, False)
        own_pool = (keys[layer], values[layer], key_scales[layer], value_scales[layer])
        norms = (query_norm[layer], key_norm[layer])
        if num_rows < FEW_ROWS:
            for row in range(num_rows):
                place = (cosines[row], sines[row], slots[row])
                _rotate_and_store(projected_heads[row], query[row], place, own_pool, norms, epsilon)
        else:
            _rotate_and_store_many(
                projected_heads, query, (cosines, sines, slots), own_pool, norms, epsilon
            )
        attend(
            query,
            keys[layer],
            values[layer],
            key_scales[layer],
            value_scales[layer],
            scaling,
            items,
            rows,
            limits,
            row_starts,
            row_entries,
            attended,
        )
        linear(attended, out[layer], out_scale[layer], out_bias[layer], hidden, True)
        rms_norm(hidden, norm_post[layer], epsilon, normed)
        linear(normed, gate_up[layer], gate_up_scale[layer], no_bias, gated, False)
        gate(gated, activated)
        linear(activated, down[layer], down_scale[layer], down_bias[layer], hidden, True)


@kernel(is_parallel=True)
def _rotate_and_store_many(
    own: Floats,
    query: Floats,
    places: tuple[Floats, Floats, Ints],
    pool: tuple[Rows, Rows, Floats, Floats],
    norms: tuple[Floats, Floats],
    epsilon: np.float32,
) -> None:
    cosines, sines, slots = places
    for row in prange(own.shape[0]):
        place = (cosines[row], sines[row], slots[row])
        _rotate_and_store(own[row], query[row], place, pool, norms, epsilon)


@kernel()
def _rotate_and_store(
    own: Floats,
    query: Floats,
    place: tuple[Floats, Floats, int],
    pool: tuple[Rows, Rows, Floats, Floats],
    norms: tuple[Floats, Floats],
    epsilon: np.float32,
) -> None:
    """One row, ``own`` (heads + 2 kv_heads, head_dim): its query into ``query`` (heads, head_dim),
    its K and V into their slot."""
    keys, values, key_scales, value_scales = pool
    cosines, sines, slot = place
    heads, kv_heads = query.shape[0], keys.shape[0]
    rotate_row(own, cosines, sines, heads, kv_heads, norms[0], norms[1], epsilon)
    # Numbers one by one: compiling the copy of a slice, which could be refused, takes seconds.
    for head in range(heads):
        for d in range(query.shape[1]):
            query[head, d] = own[head, d]
    for head in range(kv_heads):
        key, value = own[heads + head], own[heads + kv_heads + head]
        if key_scales.size:
            key_scales[head, slot] = quantize(key, keys[head, slot])
            value_scales[head, slot] = quantize(value, values[head, slot])
        else:
            for d in range(query.shape[1]):
                keys[head, slot, d] = key[d]
                values[head, slot, d] = value[d]


@kernel(is_exact=True)
def quantize(x: Floats, out: NDArray[np.int8]) -> np.float32:
    """attention.kv_store's rule for one vector, with the same bits: not reassociated."""
    largest = np.float32(0)
    for i in range(x.shape[0]):
        largest = max(largest, abs(x[i]))
    scale = largest / np.float32(127)
    step = scale if scale != np.float32(0) else np.float32(1)
    for i in range(x.shape[0]):
        out[i] = np.int8(np.rint(x[i] / step))
    return scale
