"""The compiled kernels against torch, at shapes that hit each of their branches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model_worker.attention.kv_store import quantize as quantize_by_torch
from model_worker.compiled.elementwise import gate, rms_norm, rotate_row
from model_worker.compiled.jit import kernel
from model_worker.compiled.lanes import largest, put_exponentials, put_turned
from model_worker.compiled.layers import quantize
from model_worker.compiled.linear import linear as linear_of_panels
from model_worker.compiled.panels import pack

EPSILON = np.float32(1e-5)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def linear(
    x: np.ndarray,
    weight: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray,
    out: np.ndarray,
    is_added: bool,
) -> None:
    linear_of_panels(x, pack(torch.from_numpy(weight)).numpy(), scale, bias, out, is_added)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 13, 61, 130])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(1, 8), (2, 5), (7, 16), (15, 24), (16, 7), (33, 40), (49, 64), (9, 530)],
)
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
    np.testing.assert_allclose(out, added, atol=3e-5)
    linear(x, weight, scale, bias, out, False)
    np.testing.assert_allclose(out, wanted, atol=3e-5)


def int8_weight(outputs: int, inputs: int) -> np.ndarray:
    return np.random.default_rng(1).integers(-127, 128, (outputs, inputs), dtype=np.int8)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 61])
@pytest.mark.parametrize(("outputs", "inputs"), [(2, 5), (7, 16), (17, 40), (33, 1100)])
def test_linear_of_int8_weights(rows: int, outputs: int, inputs: int) -> None:
    """Within half a step of a row's largest number over 32,767, for each of its products."""
    x, scale, weight = floats(rows, inputs), floats(outputs, seed=2), int8_weight(outputs, inputs)
    out = np.empty((rows, outputs), np.float32)
    linear(x, weight, scale, np.zeros(outputs, np.float32), out, False)
    wanted = (x.astype(np.float64) @ weight.T.astype(np.float64)) * scale
    step = np.abs(x).max(axis=1, keepdims=True) / 32767
    most = step / 2 * np.abs(weight.astype(np.float64)).sum(axis=1) * np.abs(scale)
    assert (np.abs(out - wanted) <= most + 1e-4).all()
    assert np.abs(out - wanted).max() > 0


def test_the_largest_products_of_deep_rows_do_not_overflow() -> None:
    for depth in (4112, 20_000):
        x = np.full((3, depth), 3.0, np.float32)
        weight = np.full((5, depth), -127, np.int8)
        out = np.empty((3, 5), np.float32)
        linear(x, weight, np.ones(5, np.float32), np.zeros(5, np.float32), out, False)
        np.testing.assert_allclose(out, -381.0 * depth, rtol=1e-5)


@pytest.mark.parametrize("is_coded", [False, True])
@pytest.mark.parametrize("inputs", [64, 83, 1331])
def test_a_row_is_the_same_to_the_bit_in_every_batch(is_coded: bool, inputs: int) -> None:
    """An outlier beside it least of all: activations have no scale that they share."""
    weight = int8_weight(41, inputs) if is_coded else floats(41, inputs, seed=1)
    x = floats(131, inputs)
    x[3] *= 1e4
    scale, bias = np.full(41, 0.01, np.float32), floats(41, seed=5)
    alone = np.empty((131, 41), np.float32)
    for row in range(131):
        linear(x[row : row + 1], weight, scale, bias, alone[row : row + 1], False)
    for rows in (2, 3, 4, 5, 16, 47, 64, 131):
        together = np.empty((rows, 41), np.float32)
        linear(x[:rows], weight, scale, bias, together, False)
        np.testing.assert_array_equal(together, alone[:rows])


@pytest.mark.parametrize("is_coded", [False, True])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_row_with_a_wrong_number_is_wrong_and_alone(is_coded: bool, wrong: float) -> None:
    weight = int8_weight(9, 32) if is_coded else floats(9, 32, seed=1)
    x = floats(5, 32)
    x[2, 7] = wrong
    out = np.empty((5, 9), np.float32)
    linear(x, weight, np.ones(9, np.float32), np.zeros(9, np.float32), out, False)
    assert not np.isfinite(out[2]).any()
    assert np.isfinite(out[[0, 1, 3, 4]]).all()


@kernel()
def exponentials(x: np.ndarray, row: int, count: int, top: float) -> float:
    total: float = put_exponentials(x, row, count, np.float32(top))
    return total


def test_exponentials() -> None:
    x = np.concatenate([np.linspace(-87, 87, 4001), [0.0, -1e30, -1e-30] * 5]).astype(np.float32)
    x = np.stack([x, x + np.float32(2.5)])
    for row, top in ((0, 0.0), (1, 2.5)):
        numbers = x.copy()
        shifted = np.clip((numbers[row] - np.float32(top)).astype(np.float64), -87, 87)
        exponentials(numbers, row, 4008, top)
        assert np.abs(numbers[row, :4008] / np.exp(shifted[:4008]) - 1).max() < 3e-7
        assert exponentials(x.copy(), row, 1600, top) == pytest.approx(
            numbers[row, :1600].sum(dtype=np.float64), rel=1e-5
        )
        np.testing.assert_array_equal(numbers[row, 4008:], x[row, 4008:])
        np.testing.assert_array_equal(numbers[1 - row], x[1 - row])
    assert numbers[1, 4001] == 1.0


@pytest.mark.parametrize("rows", [3, 20])
def test_rms_norm(rows: int) -> None:
    x, weight = floats(rows, 20), floats(20, seed=1)
    out = np.empty_like(x)
    rms_norm(x, weight, EPSILON, out)
    wanted = F.rms_norm(torch.from_numpy(x), (20,), torch.from_numpy(weight), float(EPSILON))
    np.testing.assert_allclose(out, wanted.numpy(), atol=1e-6)


@pytest.mark.parametrize("width", [20, 24])
@pytest.mark.parametrize("rows", [3, 20])
def test_gate(rows: int, width: int) -> None:
    gate_up = 10 * floats(rows, 2 * width)
    out = np.empty((rows, width), np.float32)
    gate(gate_up, out)
    wanted = F.silu(torch.from_numpy(gate_up[:, :width])).numpy() * gate_up[:, width:]
    np.testing.assert_allclose(out, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_normed", [False, True])
def test_rotate(is_normed: bool) -> None:
    heads, kv_heads, dim = 4, 2, 8
    projected = floats(3, heads + 2 * kv_heads, dim)
    before = projected.copy()
    cosines, sines = np.cos(floats(3, dim, seed=1)), np.sin(floats(3, dim, seed=1))
    size = dim if is_normed else 0
    query_norm, key_norm = floats(size, seed=2), floats(size, seed=3)
    for row in range(3):
        rotate_row(
            projected[row], cosines[row], sines[row], heads, kv_heads, query_norm, key_norm, EPSILON
        )
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


@kernel()
def turn(x: np.ndarray, row: int, column: int, out: np.ndarray, i: int, first: int) -> None:
    put_turned(x, row, column, out, i, first)


@kernel()
def largest_of(x: np.ndarray, row: int, count: int) -> float:
    found: float = largest(x, row, count)
    return found


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_eight_rows_become_columns(dtype: type) -> None:
    x = np.random.default_rng(0).integers(-127, 128, (20, 30)).astype(dtype)
    out = np.zeros((3, 24, 24), np.float32)
    turn(x, 5, 11, out, 1, 16)
    wanted = np.zeros_like(out)
    wanted[1, 11:19, 16:24] = x[5:13, 11:19].T
    np.testing.assert_array_equal(out, wanted)


def test_largest() -> None:
    x = floats(3, 40)
    x[2, 33] = 50.0
    for place in range(32):
        x[1] = -np.abs(x[1])
        x[1, place] = 0.25
        assert largest_of(x, 1, 32) == 0.25
    assert largest_of(x, 2, 32) == x[2, :32].max() < 50.0
