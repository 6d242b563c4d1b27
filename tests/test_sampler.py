"""Sampling: filters and penalties by exact value, noise by independence of everything else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_worker.sampler import Sampler, gumbel_noise
from tests.request_kit import make_request

VOCAB = 3000


def logits(seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def draws(row: torch.Tensor, count: int, **params: object) -> list[int]:
    """``count`` draws from the same row by requests that differ in their seed only."""
    requests = [make_request(seed=seed, **params) for seed in range(count)]
    return Sampler().sample(row.expand(count, -1), requests)


def test_greedy_takes_the_best() -> None:
    rows = logits(rows=3)
    requests = [make_request(name=str(i)) for i in range(3)]
    assert Sampler().sample(rows, requests) == rows.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-5, 1e-20, 1e-39, 1e-300])
def test_a_temperature_next_to_zero_takes_the_best(temperature: float) -> None:
    row = logits() - 3
    best = int(row.argmax())
    assert draws(row, 5, temperature=temperature) == [best] * 5
    assert draws(row, 5, temperature=temperature, top_p=0.9, min_p=0.1) == [best] * 5


def test_noise_depends_on_seed_and_position_alone() -> None:
    assert torch.equal(gumbel_noise(5, 9, VOCAB), gumbel_noise(5, 9, VOCAB))
    assert not torch.equal(gumbel_noise(5, 9, VOCAB), gumbel_noise(5, 10, VOCAB))
    assert not torch.equal(gumbel_noise(5, 9, VOCAB), gumbel_noise(6, 9, VOCAB))
    assert torch.equal(gumbel_noise(-1, 0, VOCAB), gumbel_noise(2**64 - 1, 0, VOCAB))
    assert torch.isfinite(gumbel_noise(5, 9, VOCAB)).all()


def test_the_same_seed_draws_the_same_whatever_the_batch() -> None:
    rows = logits(rows=4)
    alone = Sampler().sample(rows[2:3], [make_request(seed=11, temperature=1.0)])
    requests = [make_request(seed=seed, temperature=1.0) for seed in (1, 2, 11, 3)]
    assert Sampler().sample(rows, requests)[2] == alone[0]
    assert len(set(draws(rows[0], 50, temperature=1.0))) > 20


def test_draws_follow_the_distribution() -> None:
    row = torch.tensor([[0.0, 1.0, 2.0]])
    wanted = torch.softmax(row[0], 0)
    counts = np.bincount(draws(row, 4000, temperature=1.0), minlength=3) / 4000
    # Standard error of each frequency is below 0.008.
    np.testing.assert_allclose(counts, wanted.numpy(), atol=0.03)
    cold = np.bincount(draws(row, 2000, temperature=0.5), minlength=3) / 2000
    np.testing.assert_allclose(cold, torch.softmax(row[0] / 0.5, 0).numpy(), atol=0.04)


def test_top_k_keeps_the_k_best() -> None:
    row = logits(1)
    best = set(row[0].topk(5).indices.tolist())
    assert set(draws(row, 300, temperature=2.0, top_k=5)) == best
    assert set(draws(row, 10, temperature=2.0, top_k=1)) == {int(row[0].argmax())}


@pytest.mark.parametrize(("spread", "top_p"), [(2.0, 0.5), (0.01, 0.9)])
def test_top_p_keeps_the_smallest_sufficient_set(spread: float, top_p: float) -> None:
    """The flat row needs more than the candidates looked at first."""
    row = logits(2) * spread
    order = row[0].softmax(0).sort(descending=True)
    size = int((order.values.cumsum(0) < top_p).sum()) + 1
    kept = set(order.indices[:size].tolist())
    drawn = set(draws(row, 400, temperature=1.0, top_p=top_p))
    assert drawn <= kept
    if spread == 2.0:
        assert drawn == kept or len(drawn) > 0.5 * len(kept)
    assert set(draws(row, 20, temperature=1.0, top_p=1e-9)) == {int(row[0].argmax())}


def test_min_p_is_relative_to_the_likeliest() -> None:
    row = torch.full((1, 5), -50.0)
    row[0, :3] = torch.log(torch.tensor([0.6, 0.3, 0.1]))
    assert set(draws(row, 200, temperature=1.0, min_p=0.3)) == {0, 1}
    assert set(draws(row, 200, temperature=1.0, min_p=0.1)) == {0, 1, 2}


def test_presence_and_frequency_count_the_output_only() -> None:
    row = torch.tensor([[5.0, 4.9, 4.0, 0.0]])
    # Token 0 is in the prompt alone: untouched.
    request = make_request(prompt=[0, 0], output=[1, 1], presence_penalty=2.0)
    assert Sampler().sample(row, [request]) == [0]
    request = make_request(prompt=[3], output=[0], presence_penalty=0.2)
    assert Sampler().sample(row, [request]) == [1]
    # 5 - 0.6 * 2 = 3.8 < 4.0; token 1: 4.9 - 0.6 = 4.3
    request = make_request(prompt=[3], output=[0, 0, 1], frequency_penalty=0.6)
    assert Sampler().sample(row, [request]) == [1]
    request = make_request(prompt=[3], output=[0, 0, 1, 1], frequency_penalty=0.6)
    assert Sampler().sample(row, [request]) == [2]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    row = torch.tensor([[4.0, 3.0, -1.0, -1.5]])
    request = make_request(prompt=[0], repetition_penalty=2.0)
    assert Sampler().sample(row, [request]) == [1]
    row = torch.tensor([[-9.0, -9.0, -1.0, -1.5]])
    request = make_request(prompt=[2], repetition_penalty=2.0)
    assert Sampler().sample(row, [request]) == [3]


def test_logit_bias_forbids_and_forces() -> None:
    row = logits(3)
    best = int(row[0].argmax())
    request = make_request(logit_bias={best: -100.0})
    assert Sampler().sample(row, [request]) == [int(row[0].topk(2).indices[1])]
    assert Sampler().sample(row, [make_request(logit_bias={17: 100.0})]) == [17]
    before = row.clone()
    Sampler().sample(row, [make_request(logit_bias={17: 100.0})])
    assert torch.equal(row, before)
