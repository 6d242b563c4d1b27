"""The layout of packed weights, number by number, and the limit on what is summed at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_worker.compiled.linear import block_of, linear
from model_worker.compiled.panel_sums import MOST_PRODUCTS
from model_worker.compiled.panels import pack, panels_shape, rows_of, unpack


def numbered(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(1, outputs * inputs + 1) % 127 + 1).view(outputs, inputs).to(dtype)


@pytest.mark.parametrize(("outputs", "inputs"), [(24, 4), (48, 3), (1, 1), (25, 7), (70, 2)])
def test_floats_lie_input_by_input(outputs: int, inputs: int) -> None:
    weight = numbered(outputs, inputs, torch.float32)
    panels = pack(weight)
    assert panels.shape == (-(-outputs // 24), inputs, 24)
    assert panels.shape == panels_shape(outputs, inputs, torch.float32)
    for n in range(panels.shape[0] * 24):
        own = panels[n // 24, :, n % 24]
        assert torch.equal(own, weight[n] if n < outputs else torch.zeros(inputs))
    assert torch.equal(unpack(panels, outputs, inputs), weight)


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 4), (32, 3), (1, 1), (17, 7), (70, 2)])
def test_integers_lie_in_pairs_of_inputs(outputs: int, inputs: int) -> None:
    weight = numbered(outputs, inputs, torch.int8)
    panels = pack(weight)
    assert panels.shape == (-(-outputs // 16), -(-inputs // 2), 32)
    assert panels.shape == panels_shape(outputs, inputs, torch.int8)
    padded = torch.zeros(panels.shape[0] * 16, panels.shape[1] * 2, dtype=torch.int8)
    padded[:outputs, :inputs] = weight
    for n in range(len(padded)):
        pairs = panels[n // 16, :, 2 * (n % 16) : 2 * (n % 16) + 2]
        assert torch.equal(pairs.reshape(-1), padded[n])
    assert torch.equal(unpack(panels, outputs, inputs), weight)


def test_rows_of_an_embedding_come_back() -> None:
    weight = torch.randn(50, 6)
    ids = np.array([49, 0, 24, 23, 24])
    rows = rows_of(pack(weight).numpy(), ids)
    np.testing.assert_array_equal(rows, weight.numpy()[ids])
    assert rows.flags.c_contiguous


def test_no_more_products_are_summed_than_int32_holds() -> None:
    assert MOST_PRODUCTS * 127 * 32767 <= 2**31 - 1 < (MOST_PRODUCTS + 1) * 127 * 32767
    assert (block_of(576, 516), block_of(1536, 256), block_of(1, 256)) == (288, 256, 2)
    for depth in range(1, 3000):
        block = block_of(depth, 516)
        assert block <= 516
        assert block % 2 == 0
        blocks = -(-depth // 516)
        assert (blocks - 1) * block < depth <= blocks * block


def test_the_deepest_block_is_summed_exactly() -> None:
    """All products at their largest, in one block of as many as are summed at once."""
    depth = MOST_PRODUCTS - MOST_PRODUCTS % 2
    panels = pack(torch.full((3, depth), 127, dtype=torch.int8)).numpy()
    x, out = np.full((2, depth), 32767.0, np.float32), np.empty((2, 3), np.float32)
    linear(x, panels, np.ones(3, np.float32), np.zeros(3, np.float32), out, False)
    np.testing.assert_array_equal(out, np.float32(depth * 127 * 32767))
