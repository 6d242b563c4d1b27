"""Whole blocks out of the device's tensors and into them, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache_store.tiers.device_blocks import CpuBlocks, device_blocks
from tests.device_kit import DTYPES, block_of, make_spec, make_tier, raw


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_is_read_heads_first(dtype: str) -> None:
    tier = make_tier(make_spec(dtype))
    blocks = device_blocks(tier)
    assert isinstance(blocks, CpuBlocks)
    for block_id in (0, 3, 5):
        view = blocks.read(block_id)
        for part, tensor in ((view.keys, tier.keys), (view.values, tier.values)):
            assert part.shape == (3, 2, 4, 8 * DTYPES[dtype])
            wanted = tensor[:, block_id].transpose(1, 2).contiguous()
            assert part.tobytes() == raw(wanted).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_that_is_written_is_there_and_no_other_changes(dtype: str) -> None:
    source, tier = make_tier(make_spec(dtype), seed=1), make_tier(make_spec(dtype), seed=2)
    before = [block_of(tier, block_id) for block_id in range(6)]
    wanted = block_of(source, 4)
    view = device_blocks(source).read(4)
    blocks = device_blocks(tier)
    target = blocks.target(2)
    np.copyto(target.keys, view.keys)
    np.copyto(target.values, view.values)
    blocks.commit(2)
    for block_id in range(6):
        expected = wanted if block_id == 2 else before[block_id]
        assert torch.equal(block_of(tier, block_id), expected)


def test_what_the_engine_writes_is_what_is_read() -> None:
    """A view is not a copy made at the start."""
    tier = make_tier(make_spec())
    blocks = device_blocks(tier)
    tier.keys[1, 3, 2, 1] = 5.0
    view = blocks.read(3)
    assert view.keys[1, 1, 2].view(np.float32).tolist() == [5.0] * 8
