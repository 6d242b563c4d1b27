"""Whole blocks out of the device's tensors and into them, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache_store.tiers.device_blocks import CpuBlocks, device_blocks
from tests.device_kit import STORED_DTYPES, make_spec, make_tier, raw


@pytest.mark.parametrize("dtype", STORED_DTYPES)
def test_a_block_is_read_heads_first(dtype: str) -> None:
    tier = make_tier(make_spec(dtype))
    blocks = device_blocks(tier)
    assert isinstance(blocks, CpuBlocks)
    for block_id in (0, 3, 5):
        view = blocks.read(block_id)
        assert view.keys.shape == view.values.shape == (3, 2, 4, 8 * STORED_DTYPES[dtype])
        assert (view.key_scales is None) == (view.value_scales is None) == (dtype != "int8")
        for part, tensor in zip(view.parts, tier.tensors, strict=True):
            wanted = tensor[:, block_id].transpose(1, 2).contiguous()
            assert part.tobytes() == raw(wanted).tobytes()


@pytest.mark.parametrize("dtype", STORED_DTYPES)
def test_a_block_that_is_written_is_there_and_no_other_changes(dtype: str) -> None:
    source, tier = make_tier(make_spec(dtype), seed=1), make_tier(make_spec(dtype), seed=2)
    before = [tensor.clone() for tensor in tier.tensors]
    view = device_blocks(source).read(4)
    blocks = device_blocks(tier)
    target = blocks.target(2)
    for to, of in zip(target.parts, view.parts, strict=True):
        np.copyto(to, of)
    blocks.commit(2)
    for tensor, old, other in zip(tier.tensors, before, source.tensors, strict=True):
        old[:, 2] = other[:, 4]
        assert torch.equal(tensor, old)


def test_what_the_engine_writes_is_what_is_read() -> None:
    """A view is not a copy made at the start."""
    tier = make_tier(make_spec())
    blocks = device_blocks(tier)
    tier.keys[1, 3, 2, 1] = 5.0
    view = blocks.read(3)
    assert view.keys[1, 1, 2].view(np.float32).tolist() == [5.0] * 8
