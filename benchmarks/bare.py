"""The ideal that the engine is measured against: transformers' own forward, nothing around it.

Its KV lies in one preallocated contiguous buffer per layer, written in place and read as a view,
so that no step copies what earlier steps stored.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from model_worker.loader import load_model, resolve_model


class ContiguousLayer(DynamicLayer):
    """Buffers (batch, kv_heads, capacity, head_dim); ``keys`` and ``values`` are what is used."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            batch, heads, _, dim = key_states.shape
            self.key_buffer = torch.empty(batch, heads, self.capacity, dim)
            self.value_buffer = torch.empty(batch, heads, self.capacity, dim)
            self.is_initialized = True
        end = self.length + key_states.shape[2]
        self.key_buffer[:, :, self.length : end] = key_states
        self.value_buffer[:, :, self.length : end] = value_states
        self.rewind(end)
        return self.keys, self.values

    @torch.inference_mode()
    def pretend(self) -> None:
        """Fill the whole capacity with noise: what is stored there does not change the time."""
        self.key_buffer.normal_()
        self.value_buffer.normal_()

    def rewind(self, length: int) -> None:
        self.length = length
        self.keys = self.key_buffer[:, :, :length]
        self.values = self.value_buffer[:, :, :length]


class BareModel:
    """The demo model of its own, since a worker's has given its weights up. Times are seconds."""

    def __init__(self) -> None:
        source = resolve_model("demo")
        self.model = load_model(source, attn_implementation="sdpa").model

    def cache(self, capacity: int) -> Cache:
        layers = [ContiguousLayer(capacity) for _ in range(self.model.config.num_hidden_layers)]
        return Cache(layers=layers)

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor, cache: Cache, context: int) -> float:
        """One forward of ``ids`` (batch, new) after the first ``context`` tokens of ``cache``."""
        for layer in cache.layers:
            assert isinstance(layer, ContiguousLayer)
            if layer.is_initialized:
                layer.rewind(context)
        positions = torch.arange(context, context + ids.shape[1])[None].expand(ids.shape[0], -1)
        started = time.perf_counter()
        logits = self.model(
            input_ids=ids,
            position_ids=positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        logits.argmax(-1)
        return time.perf_counter() - started
