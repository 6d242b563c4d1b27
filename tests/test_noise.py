"""The noise of sampling: pure, per token, and distributed as it has to be."""

from __future__ import annotations

import numpy as np
import torch

from model_worker.noise import gumbel_noise, noise_keys

VOCAB = 3000
EULER = 0.5772156649
GOLDEN_KEYS = [[1293516399, -1492722385], [695082557, -1699798568]]
GOLDEN_NOISE = [0.8700886964797974, -1.2024613618850708, 1.0241698026657104, 1.130409598350525]


def noise(seed: int, position: int, vocab_size: int = VOCAB) -> torch.Tensor:
    return gumbel_noise(keys([seed], [position]), torch.arange(vocab_size))[0]


def keys(seeds: list[int], positions: list[int]) -> torch.Tensor:
    unsigned = [seed % 2**64 for seed in seeds]
    table = noise_keys(np.array(unsigned, np.uint64), np.array(positions, np.uint64))
    assert table.shape == (len(seeds), 2)
    return torch.from_numpy(table)


def test_depends_on_seed_and_position_alone() -> None:
    assert torch.equal(noise(5, 9), noise(5, 9))
    assert not torch.equal(noise(5, 9), noise(5, 10))
    assert not torch.equal(noise(5, 9), noise(6, 9))
    assert torch.equal(noise(-1, 0), noise(2**64 - 1, 0))


def test_rows_and_tokens_stand_alone() -> None:
    table = gumbel_noise(keys([3, 4, 3], [0, 7, 1]), torch.arange(VOCAB))
    for row, (seed, position) in zip(table, ((3, 0), (4, 7), (3, 1)), strict=True):
        assert torch.equal(row, noise(seed, position))
        some = torch.tensor([2, 999, 17])
        assert torch.equal(row[some], gumbel_noise(keys([seed], [position]), some)[0])


def test_the_numbers_themselves_do_not_change() -> None:
    """A seeded answer is the same after an upgrade."""
    table = noise_keys(np.array([0, 7], np.uint64), np.array([0, 3], np.uint64))
    assert table.tolist() == GOLDEN_KEYS
    np.testing.assert_allclose(noise(7, 3, 4).numpy(), GOLDEN_NOISE, rtol=1e-6)


def test_moments_and_distribution_are_those_of_gumbel() -> None:
    values = gumbel_noise(keys(list(range(100)), [0] * 100), torch.arange(10_000)).flatten()
    assert torch.isfinite(values).all()
    assert abs(float(values.mean()) - EULER) < 0.005
    assert abs(float(values.var()) - np.pi**2 / 6) < 0.02
    # Kolmogorov-Smirnov at a million draws: 1.95 / sqrt(n) is passed once in a thousand tries.
    ordered = values.double().sort().values
    wanted = torch.exp(-torch.exp(-ordered))
    ranks = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    assert float((wanted - ranks).abs().max()) < 1.95 / 1000


def test_neighbours_are_independent() -> None:
    """Seeds, positions and tokens that differ by one bit."""
    base = gumbel_noise(keys([8] * 64, list(range(64))), torch.arange(VOCAB))
    by_position = np.corrcoef(base[:-1].flatten(), base[1:].flatten())[0, 1]
    by_token = np.corrcoef(base[:, :-1].flatten(), base[:, 1:].flatten())[0, 1]
    by_seed = np.corrcoef(
        base.flatten(), gumbel_noise(keys([9] * 64, list(range(64))), torch.arange(VOCAB)).flatten()
    )
    for correlation in (by_position, by_token, by_seed[0, 1]):
        assert abs(correlation) < 5 / np.sqrt(64 * VOCAB)


def test_the_largest_draws_keep_their_digits() -> None:
    """The upper tail decides about rare tokens: it must not be a few values only."""
    values = gumbel_noise(keys(list(range(400)), [1] * 400), torch.arange(10_000)).flatten()
    top = values.topk(200).values
    assert len(top.unique()) == 200
    assert float(top[0]) > 13
