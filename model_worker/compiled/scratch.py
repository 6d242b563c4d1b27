"""The arrays between the parts of a layer, kept from step to step.

Fresh memory of this size would cost a page fault every 4 KiB in each step. Knows sizes only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from model_worker.compiled.weights import LayerWeights

Floats = NDArray[np.float32]


class StepScratch:
    """As large as the largest step so far."""

    def __init__(self, weights: LayerWeights, kv_heads: int, head_dim: int) -> None:
        hidden, qkv = weights.norm_in.shape[1], weights.qkv_scale.shape[1]
        attended = qkv - 2 * kv_heads * head_dim
        inner = weights.gate_up_scale.shape[1] // 2
        self._head_dim = head_dim
        self._widths = (hidden, qkv, attended, attended, 2 * inner, inner)
        self._kept = [np.empty((0, width), np.float32) for width in self._widths]

    def arrays(self, num_rows: int) -> tuple[Floats, ...]:
        """For a step of so many rows, in the order that the layers take them: normed (rows,
        hidden), projected (rows, qkv), the same by heads (rows, heads + 2 kv_heads, head_dim),
        query (rows, heads, head_dim), attended (rows, heads * head_dim), gated (rows, 2 * inner),
        activated (rows, inner). Good until the next call."""
        if len(self._kept[0]) < num_rows:
            self._kept = [np.empty((num_rows, width), np.float32) for width in self._widths]
        normed, projected, query, *rest = (array[:num_rows] for array in self._kept)
        # Here, since compiling a change of shape takes longer than compiling the rest of a layer.
        heads, queries = (x.reshape(num_rows, -1, self._head_dim) for x in (projected, query))
        return (normed, projected, heads, queries, *rest)
