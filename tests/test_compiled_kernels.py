"""The compiled kernels against torch, at shapes that hit each of their branches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model_worker.attention.kv_store import quantize as quantize_by_torch
from model_worker.compiled.elementwise import (
    decode_weights,
    exponentials,
    gate,
    rms_norm,
    rotate,
)
from model_worker.compiled.layers import quantize
from model_worker.compiled.linear import linear

EPSILON = np.float32(1e-5)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 13])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (15, 24), (16, 7), (33, 40)])
def test_linear(rows: int, outputs: int, inputs: int) -> None:
    x, weight, scale, bias = (
        floats(rows, inputs),
        floats(outputs, inputs, seed=1),
        floats(outputs, seed=2),
        floats(outputs, seed=3),
    )
    out = floats(rows, outputs, seed=4)
    wanted = (x.astype(np.float64) @ weight.T.astype(np.float64)) * scale + bias
    added = out + wanted
    linear(x, weight, scale, bias, out, True)
    np.testing.assert_allclose(out, added, atol=2e-5)
    linear(x, weight, scale, bias, out, False)
    np.testing.assert_allclose(out, wanted, atol=2e-5)


def test_linear_of_int8_weights() -> None:
    x, scale = floats(6, 40), floats(17, seed=2)
    weight = np.random.default_rng(1).integers(-127, 128, (17, 40), dtype=np.int8)
    out = np.empty((6, 17), np.float32)
    linear(x, weight, scale, np.zeros(17, np.float32), out, False)
    wanted = (x.astype(np.float64) @ weight.T.astype(np.float64)) * scale
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=2e-4)
    decoded = np.empty((17, 40), np.float32)
    decode_weights(weight, scale, decoded)
    np.testing.assert_array_equal(decoded, weight.astype(np.float32) * scale[:, None])


def test_a_row_does_not_depend_on_its_batch_beyond_rounding() -> None:
    """An outlier beside it least of all: activations have no scale that they share."""
    x = floats(8, 64)
    x[3] *= 1e4
    weight = np.random.default_rng(1).integers(-127, 128, (32, 64), dtype=np.int8)
    scale, bias = np.full(32, 0.01, np.float32), np.zeros(32, np.float32)
    together, alone = np.empty((8, 32), np.float32), np.empty((1, 32), np.float32)
    linear(x, weight, scale, bias, together, False)
    for row in (0, 7):
        linear(x[row : row + 1], weight, scale, bias, alone, False)
        np.testing.assert_allclose(together[row], alone[0], atol=1e-5)


def test_exponentials() -> None:
    x = np.concatenate([np.linspace(-87, 87, 4001), [0.0, -1e30, -1e-30]]).astype(np.float32)
    wanted = np.exp(np.maximum(x, -87).astype(np.float64))
    exponentials(x, np.empty(len(x), np.int32), len(x))
    assert np.abs(x / wanted - 1).max() < 3e-7
    assert x[4001] == 1.0


def test_rms_norm() -> None:
    x, weight = floats(3, 20), floats(20, seed=1)
    out = np.empty_like(x)
    rms_norm(x, weight, EPSILON, out)
    wanted = F.rms_norm(torch.from_numpy(x), (20,), torch.from_numpy(weight), float(EPSILON))
    np.testing.assert_allclose(out, wanted.numpy(), atol=1e-6)


def test_gate() -> None:
    gate_up = 10 * floats(3, 40)
    out = np.empty((3, 20), np.float32)
    gate(gate_up, out)
    wanted = F.silu(torch.from_numpy(gate_up[:, :20])).numpy() * gate_up[:, 20:]
    np.testing.assert_allclose(out, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_normed", [False, True])
def test_rotate(is_normed: bool) -> None:
    heads, kv_heads, dim = 4, 2, 8
    projected = floats(3, heads + 2 * kv_heads, dim)
    before = projected.copy()
    cosines, sines = np.cos(floats(3, dim, seed=1)), np.sin(floats(3, dim, seed=1))
    size = dim if is_normed else 0
    query_norm, key_norm = floats(size, seed=2), floats(size, seed=3)
    rotate(projected, cosines, sines, heads, kv_heads, query_norm, key_norm, EPSILON)
    for part, norm in ((slice(0, 4), query_norm), (slice(4, 6), key_norm)):
        x = torch.from_numpy(before[:, part])
        if is_normed:
            x = F.rms_norm(x, (dim,), torch.from_numpy(norm), float(EPSILON))
        turned = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), dim=-1)
        wanted = x * torch.from_numpy(cosines)[:, None] + turned * torch.from_numpy(sines)[:, None]
        np.testing.assert_allclose(projected[:, part], wanted.numpy(), atol=1e-6)
    np.testing.assert_array_equal(projected[:, 6:], before[:, 6:])


def test_rows_are_coded_with_the_bits_of_every_other_backend() -> None:
    x = floats(500, 64) * np.exp(3 * floats(500, 1, seed=1))
    x[7] = 0.0
    numbers, scales = np.empty((500, 64), np.int8), np.empty(500, np.float32)
    for row in range(500):
        scales[row] = quantize(x[row], numbers[row])
    wanted, wanted_scales = quantize_by_torch(torch.from_numpy(x))
    np.testing.assert_array_equal(numbers, wanted.numpy())
    np.testing.assert_array_equal(scales, wanted_scales.numpy())
