"""Rows as they are stored: int8 within half a step, each row for itself, in place in the tier."""

from __future__ import annotations

import pytest
import torch

from model_worker.attention.kv_store import dequantize, layer_rows, quantize
from tests.device_kit import DTYPES, make_spec, make_tier


def draw(*shape: int, seed: int = 1, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_a_vector_s_largest_number_is_127_steps() -> None:
    rows = torch.tensor([[2.54, -1.27, 0.01, 0.0], [0.0, 0.0, 0.0, 0.0], [-127.0, 64.5, 1.5, 2.5]])
    numbers, scales = quantize(rows)
    assert numbers.tolist() == [[127, -64, 0, 0], [0, 0, 0, 0], [-127, 64, 2, 2]]
    assert numbers.dtype is torch.int8
    torch.testing.assert_close(scales, torch.tensor([0.02, 0.0, 1.0]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_the_error_is_at_most_half_a_step(dtype: str, scale: float) -> None:
    rows = draw(5, 3, 64, scale=scale).to(getattr(torch, dtype))
    numbers, scales = quantize(rows)
    back = dequantize(numbers, scales)
    assert bool(((back - rows.float()).abs() <= 0.5001 * scales[..., None]).all())
    assert dequantize(numbers, scales, rows.dtype).dtype is rows.dtype


def test_a_row_depends_on_itself_alone() -> None:
    rows = draw(40, 3, 64)
    numbers, scales = quantize(rows)
    for start, stop in ((0, 1), (7, 8), (13, 40)):
        alone, own_scales = quantize(rows[start:stop])
        assert torch.equal(alone, numbers[start:stop])
        assert torch.equal(own_scales, scales[start:stop])
    other = rows.clone()
    other[4] *= 1000
    assert torch.equal(quantize(other)[0][5:], numbers[5:])
    heads_first, _ = quantize(rows.transpose(0, 1))
    assert torch.equal(heads_first.transpose(0, 1), numbers)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("order", ["slots first", "heads first"])
def test_rows_are_written_into_the_tier_and_read_back(dtype: str, order: str) -> None:
    """Three rows into slots of three blocks of four, everything else as it was."""
    tier = make_tier(make_spec(dtype))
    before = [tensor.clone() for tensor in tier.tensors]
    slots = torch.tensor([1, 6, 23])
    rows = draw(3, 2, 8)
    keys, values = layer_rows(tier)[1]
    if order == "slots first":
        seen = keys.flatten(0, 1).write(0, slots, rows)
        again = values.flatten(0, 1).select(0, slots)
    else:
        seen = keys.heads_first().write(2, slots, rows.transpose(0, 1)[None])[0].transpose(0, 1)
        again = values.heads_first().select(2, slots)
    stored = keys.read(torch.float32).flatten(0, 1)[slots]
    assert torch.equal(stored, seen)
    if dtype == "int8":
        assert tier.key_scales is not None
        numbers, scales = quantize(rows)
        assert torch.equal(tier.keys[1].flatten(0, 1)[slots], numbers)
        assert torch.equal(tier.key_scales[1].flatten(0, 1)[slots], scales)
        assert torch.equal(seen, dequantize(numbers, scales))
    else:
        assert torch.equal(seen, rows)
    changed = [(old != new) for old, new in zip(before, tier.tensors, strict=True)]
    assert not changed[0][[0, 2]].any()
    assert not changed[1].any()
    assert changed[0][1].flatten(0, 1).any(-1).any(-1).nonzero().flatten().tolist() == [1, 6, 23]
    assert again.read(torch.float32).shape == ((3, 2, 8) if order[0] == "s" else (1, 2, 3, 8))


def test_runs_and_blocks_are_those_of_the_whole() -> None:
    tier = make_tier(make_spec("int8"))
    rows = layer_rows(tier)[2][0].heads_first()
    whole = rows.read(torch.float32)
    assert torch.equal(rows.narrow(2, 5, 9).read(torch.float32), whole[:, :, 5:14])
    blocks = rows.unflatten(2, 4).select(2, torch.tensor([3, 1])).flatten(2, 3)
    wanted = torch.cat([whole[:, :, 12:16], whole[:, :, 4:8]], dim=2)
    assert torch.equal(blocks.read(torch.float32), wanted)
