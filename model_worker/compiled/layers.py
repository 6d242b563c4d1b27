"""All decoder layers of a Llama-like model in one call, for few tokens.

RMSNorm, rotary embedding by halves, grouped-query attention over the paged pool, SwiGLU: the shape
that Llama brought and many models share. One call per step instead of some forty per layer, since
with few tokens the calls cost as much as the arithmetic.

Knows arrays only. The weights of all layers lie in one array per kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_worker.compiled.attention import attend
from model_worker.compiled.elementwise import gate_row, rms_norm_row, rotate_row
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
    epsilon: np.float32,
    scaling: np.float32,
) -> None:
    """Turn ``hidden`` (rows, width), the embeddings, into the last layer's output, in place, and
    store each row's K and V in ``slots`` (rows,).

    ``cosines`` and ``sines`` (rows, head_dim). ``weights``: LayerWeights' arrays in its order;
    ``pool``: keys, values (layers, kv_heads, slots, head_dim), key and value scales (layers,
    kv_heads, slots) or of no size; ``plan``: an AttentionPlan's arrays in its order.
    """
    qkv, qkv_scale, qkv_bias, out, out_scale, out_bias, gate_up, gate_up_scale = weights[:8]
    down, down_scale, down_bias, norm_in, norm_post, query_norm, key_norm = weights[8:]
    keys, values, key_scales, value_scales = pool
    items, rows, limits, row_starts, row_entries = plan
    num_rows, width = hidden.shape
    num_layers, kv_heads, _, dim = keys.shape
    heads = out.shape[2] // dim
    normed = np.empty((num_rows, width), np.float32)
    projected = np.empty((num_rows, (heads + 2 * kv_heads) * dim), np.float32)
    query = np.empty((num_rows, heads, dim), np.float32)
    attended = np.empty((num_rows, heads * dim), np.float32)
    inner = down.shape[2]
    gated = np.empty((num_rows, 2 * inner), np.float32)
    activated = np.empty((num_rows, inner), np.float32)
    no_bias = np.zeros(2 * inner, np.float32)
    powers = np.empty(inner, np.int32)
    for layer in range(num_layers):
        for row in range(num_rows):
            rms_norm_row(hidden[row], norm_in[layer], epsilon, normed[row])
        linear(normed, qkv[layer], qkv_scale[layer], qkv_bias[layer], projected, False)
        for row in range(num_rows):
            own = projected[row].reshape(heads + 2 * kv_heads, dim)
            rotate_row(
                own,
                cosines[row],
                sines[row],
                heads,
                kv_heads,
                query_norm[layer],
                key_norm[layer],
                epsilon,
            )
            query[row] = own[:heads]
            for head in range(kv_heads):
                key, value = own[heads + head], own[heads + kv_heads + head]
                slot = slots[row]
                if key_scales.size:
                    key_scales[layer, head, slot] = quantize(key, keys[layer, head, slot])
                    value_scales[layer, head, slot] = quantize(value, values[layer, head, slot])
                else:
                    keys[layer, head, slot] = key
                    values[layer, head, slot] = value
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
        for row in range(num_rows):
            rms_norm_row(hidden[row], norm_post[layer], epsilon, normed[row])
        linear(normed, gate_up[layer], gate_up_scale[layer], no_bias, gated, False)
        for row in range(num_rows):
            gate_row(gated[row, :inner], gated[row, inner:], activated[row], powers)
        linear(activated, down[layer], down_scale[layer], down_bias[layer], hidden, True)


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
