"""Random lives of int8 rows on the device and below it against a mirror that is kept by hand.

Rows are stored in chunks of any size and either order of indices, copied between blocks and moved
from tier to tier by the real transfers. Whatever happened to a row, its numbers and its scales are
bit for bit what the row alone gives.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache_store.cache import RowCopy
from cache_store.events import Tier
from model_worker.attention.kv_store import layer_rows
from tests.disk_kit import BLOCK_SIZE
from tests.test_transfer_threads import KEYS, bench

NUM_BLOCKS = 4
HEADS, HEAD_DIM, LAYERS = 2, 8, 3
BLOCKS = st.integers(0, NUM_BLOCKS - 1)
PLACES = st.integers(0, len(KEYS) - 1)
Row = tuple[bytes, ...]
"""Numbers and scales of K, then of V, over all layers and heads."""
Rows = list[Row | None]  # of a block; None was never written


class Int8Machine(RuleBasedStateMachine):
    @initialize(codec_name=st.sampled_from(["exact", "int8"]))
    def start(self, codec_name: str) -> None:
        self.stack = ExitStack()
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(os, "fsync", lambda _: None)  # a busy disk takes long over each
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.bench = self.stack.enter_context(bench(folder, codec_name, dtype="int8"))
        self.layers = layer_rows(self.bench.device)
        self.device: list[Rows] = [[None] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.below: dict[tuple[Tier, int], Rows] = {}
        for block_id in range(1, NUM_BLOCKS):  # one is left as it is when memory is fresh
            self._write(block_id, 0, draw(block_id, BLOCK_SIZE), BLOCK_SIZE // 2, block_id % 2 > 0)

    @rule(block_id=BLOCKS, seed=st.integers(0, 2**16), exponent=st.integers(-6, 6), data=st.data())
    def write(self, block_id: int, seed: int, exponent: int, data: st.DataObject) -> None:
        first = data.draw(st.integers(0, BLOCK_SIZE - 1))
        count = data.draw(st.integers(1, BLOCK_SIZE - first))
        values = draw(seed, count) * np.float32(10.0**exponent)
        values[:, :, 0, 0] *= seed % 3  # a vector of zeros now and then
        split, is_heads_first = data.draw(st.integers(0, count)), data.draw(st.booleans())
        self._write(block_id, first, values, split, is_heads_first)

    def _write(
        self, block_id: int, first: int, values: np.ndarray, split: int, is_heads_first: bool
    ) -> None:
        count = values.shape[2]
        for chunk in (slice(0, split), slice(split, count)):
            if chunk.start < chunk.stop:
                self._store(block_id, first, values, chunk, is_heads_first)
        for index in range(count):
            self.device[block_id][first + index] = coded(values[:, :, index])

    def _store(
        self, block_id: int, first: int, values: np.ndarray, chunk: slice, is_heads_first: bool
    ) -> None:
        start = block_id * BLOCK_SIZE + first
        slots = torch.arange(start + chunk.start, start + chunk.stop)
        for layer, parts in enumerate(self.layers):
            for stored, part in zip(parts, values, strict=True):
                rows = torch.from_numpy(part[layer, chunk].copy())
                if is_heads_first:
                    stored.heads_first().write(2, slots, rows.transpose(0, 1)[None])
                else:
                    stored.flatten(0, 1).write(0, slots, rows)

    @rule(of=BLOCKS, to=BLOCKS, num_rows=st.integers(1, BLOCK_SIZE))
    def copy_rows(self, of: int, to: int, num_rows: int) -> None:
        if of != to:
            self.bench.device.copy_rows([RowCopy(of, to, num_rows)])
            self.device[to][:num_rows] = self.device[of][:num_rows]

    @rule(block_id=BLOCKS, place=PLACES, tier=st.sampled_from([Tier.HOST, Tier.DISK]))
    def demote(self, block_id: int, place: int, tier: Tier) -> None:
        self.bench.copy(Tier.DEVICE, tier, [block_id], [place], keys=[KEYS[place]])
        self.below[tier, place] = list(self.device[block_id])

    @rule(place=PLACES)
    def host_to_disk(self, place: int) -> None:
        if (Tier.HOST, place) in self.below:
            self.bench.copy(Tier.HOST, Tier.DISK, [place], [place], keys=[KEYS[place]])
            self.below[Tier.DISK, place] = self.below[Tier.HOST, place]

    @rule(block_id=BLOCKS, data=st.data())
    def promote(self, block_id: int, data: st.DataObject) -> None:
        if self.below:
            tier, place = data.draw(st.sampled_from(sorted(self.below)))
            self.bench.copy(tier, Tier.DEVICE, [place], [block_id], keys=[KEYS[place]])
            self.device[block_id] = list(self.below[tier, place])

    @invariant()
    def every_row_is_what_it_alone_gives(self) -> None:
        tensors = [tensor.numpy() for tensor in self.bench.device.tensors]
        keys, values, key_scales, value_scales = tensors
        for block_id, rows in enumerate(self.device):
            for index, row in enumerate(rows):
                if row is not None:
                    parts = (keys, key_scales, values, value_scales)
                    assert row == tuple(part[:, block_id, index].tobytes() for part in parts)

    def teardown(self) -> None:
        self.stack.close()


def draw(seed: int, count: int) -> np.ndarray:
    """K and V, (2, layers, count, heads, head_dim)."""
    shape = (2, LAYERS, count, HEADS, HEAD_DIM)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def coded(row: np.ndarray) -> Row:
    """``row`` float32 (2, layers, heads, head_dim)."""
    scales = np.abs(row).max(-1) / np.float32(127)
    steps = np.where(scales == 0, np.float32(1), scales)[..., None]
    numbers = np.rint(row / steps).astype(np.int8)
    return tuple(part.tobytes() for pair in zip(numbers, scales, strict=True) for part in pair)


TestInt8 = Int8Machine.TestCase
TestInt8.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
