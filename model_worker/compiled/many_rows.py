"""All decoder layers of a Llama-like model for a step of many tokens: arithmetic is the limit.

The matrix products are numpy's, whose BLAS gets more out of the cores than the one that torch
brings (a quarter more at this model's shapes on an AMD CPU); what lies between them takes one pass
each. Attention is the step's backend's, as for every other model. Knows nothing of requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model_worker.attention.metadata import AttentionMetadata
from model_worker.compiled.elementwise import decode_weights, gate, rms_norm, rotate
from model_worker.compiled.weights import LayerWeights

Floats = NDArray[np.float32]


class ManyRows:
    """Keeps its arrays from step to step: fresh memory of this size is a page fault every 4 KiB."""

    def __init__(self, weights: LayerWeights, head_dim: int, epsilon: np.float32) -> None:
        self._weights = weights
        self._head_dim = head_dim
        self._epsilon = epsilon
        self._heads = weights.out.shape[2] // head_dim
        self._kv_heads = (weights.qkv.shape[1] // head_dim - self._heads) // 2
        self._arrays: dict[str, Floats] = {}

    def run(
        self,
        hidden: Floats,
        cosines: Floats,
        sines: Floats,
        scaling: float,
        metadata: AttentionMetadata,
    ) -> None:
        """``layers.run_layers`` for any number of rows: ``hidden`` (rows, width) in place."""
        rows, width = hidden.shape
        weights = self._weights
        inner = weights.down.shape[2]
        normed = self._array("normed", rows, width)
        projected = self._array("projected", rows, weights.qkv.shape[1])
        gate_up = self._array("gate_up", rows, 2 * inner)
        gated = self._array("gated", rows, inner)
        added = self._array("added", rows, width)
        for layer in range(len(weights.qkv)):
            rms_norm(hidden, weights.norm_in[layer], self._epsilon, normed)
            self._product("qkv", layer, normed, projected)
            projected += weights.qkv_bias[layer]
            attended = self._attend(layer, projected, cosines, sines, scaling, metadata)
            self._product("out", layer, attended, added)
            hidden += added
            hidden += weights.out_bias[layer]
            rms_norm(hidden, weights.norm_post[layer], self._epsilon, normed)
            self._product("gate_up", layer, normed, gate_up)
            gate(gate_up, gated)
            self._product("down", layer, gated, added)
            hidden += added
            hidden += weights.down_bias[layer]

    def _attend(
        self,
        layer: int,
        projected: Floats,
        cosines: Floats,
        sines: Floats,
        scaling: float,
        metadata: AttentionMetadata,
    ) -> Floats:
        heads, kv_heads = self._heads, self._kv_heads
        by_head = projected.reshape(len(projected), heads + 2 * kv_heads, self._head_dim)
        weights = self._weights
        rotate(
            by_head,
            cosines,
            sines,
            heads,
            kv_heads,
            weights.query_norm[layer],
            weights.key_norm[layer],
            self._epsilon,
        )
        heads_first = torch.from_numpy(by_head).transpose(0, 1).unsqueeze(0)
        query, key, value = torch.split(heads_first, [heads, kv_heads, kv_heads], dim=1)
        output = metadata.backend.forward(layer, query, key, value, scaling, metadata)
        attended: Floats = output.reshape(len(projected), heads * self._head_dim).numpy()
        return attended

    def _product(self, kind: str, layer: int, x: Floats, out: Floats) -> None:
        weight: NDArray[Any] = getattr(self._weights, kind)[layer]
        if weight.dtype == np.int8:
            decoded = self._array(f"{kind} weights", *weight.shape)
            decode_weights(weight, getattr(self._weights, f"{kind}_scale")[layer], decoded)
            weight = decoded
        np.matmul(x, weight.T, out=out)

    def _array(self, name: str, rows: int, width: int) -> Floats:
        kept = self._arrays.get(name)
        if kept is None or len(kept) < rows:
            kept = self._arrays[name] = np.empty((rows, width), np.float32)
        return kept[:rows]
