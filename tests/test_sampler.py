"""Sampling: filters and penalties by exact value, noise by independence of everything else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from model_worker import sampler
from model_worker.batch import ScheduledRequest
from model_worker.logit_row import LogitRow
from model_worker.noise import gumbel_noise, noise_keys
from model_worker.request import Request
from model_worker.sampler import Sampler, accepted_runs
from tests.request_kit import make_request

VOCAB = 3000


def logits(seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def sample(rows: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """One token per request, from a row each."""
    ending = [ScheduledRequest.next_of(request, request.num_tokens) for request in requests]
    drawn: list[int] = Sampler().sample(rows, ending).tolist()
    assert accepted_runs(ending, drawn) == [(token,) for token in drawn]
    return drawn


def runs_of(rows: torch.Tensor, ending: Sequence[ScheduledRequest]) -> list[tuple[int, ...]]:
    return accepted_runs(ending, Sampler().sample(rows, ending).tolist())


def draws(row: torch.Tensor, count: int, **params: object) -> list[int]:
    """``count`` draws from the same row by requests that differ in their seed only."""
    requests = [make_request(seed=seed, **params) for seed in range(count)]
    return sample(row.expand(count, -1), requests)


def test_greedy_takes_the_best() -> None:
    rows = logits(rows=3)
    requests = [make_request(name=str(i)) for i in range(3)]
    assert sample(rows, requests) == rows.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-5, 1e-20, 1e-39, 1e-300])
def test_a_temperature_next_to_zero_takes_the_best(temperature: float) -> None:
    row = logits() - 3
    best = int(row.argmax())
    assert draws(row, 5, temperature=temperature) == [best] * 5
    assert draws(row, 5, temperature=temperature, top_p=0.9, min_p=0.1) == [best] * 5


def test_the_same_seed_draws_the_same_whatever_the_batch() -> None:
    rows = logits(rows=4)
    alone = sample(rows[2:3], [make_request(seed=11, temperature=1.0)])
    requests = [make_request(seed=seed, temperature=1.0) for seed in (1, 2, 11, 3)]
    assert sample(rows, requests)[2] == alone[0]
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
    assert sample(row, [request]) == [0]
    request = make_request(prompt=[3], output=[0], presence_penalty=0.2)
    assert sample(row, [request]) == [1]
    # 5 - 0.6 * 2 = 3.8 < 4.0; token 1: 4.9 - 0.6 = 4.3
    request = make_request(prompt=[3], output=[0, 0, 1], frequency_penalty=0.6)
    assert sample(row, [request]) == [1]
    request = make_request(prompt=[3], output=[0, 0, 1, 1], frequency_penalty=0.6)
    assert sample(row, [request]) == [2]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    row = torch.tensor([[4.0, 3.0, -1.0, -1.5]])
    request = make_request(prompt=[0], repetition_penalty=2.0)
    assert sample(row, [request]) == [1]
    row = torch.tensor([[-9.0, -9.0, -1.0, -1.5]])
    request = make_request(prompt=[2], repetition_penalty=2.0)
    assert sample(row, [request]) == [3]


def test_logit_bias_forbids_and_forces() -> None:
    row = logits(3)
    best = int(row[0].argmax())
    request = make_request(logit_bias={best: -100.0})
    assert sample(row, [request]) == [int(row[0].topk(2).indices[1])]
    assert sample(row, [make_request(logit_bias={17: 100.0})]) == [17]
    before = row.clone()
    sample(row, [make_request(logit_bias={17: 100.0})])
    assert torch.equal(row, before)


def mixed_requests(count: int) -> list[Request]:
    """Every knob, in combinations that differ from row to row."""
    requests = []
    for i in range(count):
        params: dict[str, object] = {
            "temperature": (0.0, 0.7, 1.0, 1.3)[i % 4],
            "top_k": (0, 7, 0, 40, VOCAB + 5)[i % 5],
            "top_p": (1.0, 0.9, 0.999999)[i % 3],
            "min_p": (0.0, 0.02)[i // 2 % 2],
            "repetition_penalty": (1.0, 1.4)[i // 3 % 2],
            "presence_penalty": (0.0, 0.5)[i // 4 % 2],
            "frequency_penalty": (0.0, -0.3)[i // 5 % 2],
            "logit_bias": {} if i % 6 else {i: 3.0, i + 1: -2.0},
        }
        output = [(5 * i + 3 * j) % 11 for j in range(i % 9)]
        requests.append(make_request([1, 1, i], output, name=str(i), seed=100 + i, **params))
    return requests


@pytest.mark.parametrize("chunk", [1, 5 * VOCAB, 10**9])
@pytest.mark.parametrize("spread", [2.0, 0.05])
def test_a_batch_draws_what_each_row_draws_alone(
    chunk: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixed_requests(64)
    rows = logits(5, rows=64) * spread
    alone = [sample(rows[i : i + 1], [requests[i]])[0] for i in range(64)]
    monkeypatch.setattr(sampler, "CPU_CHUNK_LOGITS", chunk)
    assert sample(rows, requests) == alone
    order = list(reversed(range(64)))
    shuffled = sample(rows[order], [requests[i] for i in order])
    assert shuffled == [alone[i] for i in order]
    assert len(set(alone)) > 20


@pytest.mark.parametrize("spread", [2.0, 0.05])
def test_each_row_is_what_its_formulas_say(spread: float) -> None:
    """Against penalties, filters and choice written down once more, in float64."""
    requests = mixed_requests(64)
    rows = logits(6, rows=64) * spread
    drawn = sample(rows, requests)
    wanted = [by_the_book(row, request) for row, request in zip(rows, requests, strict=True)]
    assert drawn == wanted


def by_the_book(row: torch.Tensor, request: Request) -> int:
    params = request.sampling_params
    scores = row.double().numpy().copy()
    if params.repetition_penalty != 1.0:
        for token in set(request.token_ids.tolist()):
            factor = params.repetition_penalty
            scores[token] *= 1 / factor if scores[token] > 0 else factor
    output = request.output_token_ids.tolist()
    for token in set(output):
        count = output.count(token)
        scores[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if params.is_greedy:
        return int(scores.argmax())
    scores /= params.temperature
    if params.top_k:
        scores[np.argsort(-scores)[params.top_k :]] = -np.inf
    if params.min_p:
        scores[scores < scores.max() + np.log(params.min_p)] = -np.inf
    weights = np.exp(scores - scores.max())
    order = np.argsort(-weights)
    mass = np.cumsum(weights[order]) / weights.sum()
    scores[order[1:][mass[:-1] >= params.top_p]] = -np.inf
    position = request.num_output_tokens
    keys = noise_keys(np.array([request.seed], np.uint64), np.array([position], np.uint64))
    noise = gumbel_noise(torch.from_numpy(keys), torch.arange(len(scores)))[0]
    return int((scores + noise.numpy()).argmax())


def test_equals_of_the_last_one_kept_are_kept() -> None:
    """Which of them a sort puts first would depend on the batch."""
    row = torch.tensor([[3.0, 2.0, 2.0, 2.0, 0.0]])
    assert set(draws(row, 200, temperature=2.0, top_k=2)) == {0, 1, 2, 3}
    assert set(draws(row, 200, temperature=1.0, top_p=0.6)) == {0, 1, 2, 3}


def test_half_precision_logits_give_what_their_float32_gives() -> None:
    requests = mixed_requests(16)
    rows = logits(7, rows=16).bfloat16()
    assert sample(rows, requests) == sample(rows.float(), requests)


def test_what_is_drawn_stays_on_the_device_until_it_is_asked_for() -> None:
    rows = [LogitRow(request, request.num_tokens) for request in mixed_requests(3)]
    drawn = Sampler().draw(logits(rows=3), rows)
    assert (drawn.shape, drawn.dtype, drawn.device.type) == ((3,), torch.int64, "cpu")


def test_tokens_ahead_count_as_if_they_were_the_requests_own() -> None:
    rows = logits(8, rows=16)
    ahead = [(4, 9, 4)[: i % 4] for i in range(16)]
    requests = mixed_requests(16)
    drawn = Sampler().draw(
        rows, [LogitRow(r, r.num_tokens, a) for r, a in zip(requests, ahead, strict=True)]
    )
    for request, tokens in zip(requests, ahead, strict=True):
        for token in tokens:
            request.append(token)
    assert drawn.tolist() == sample(rows, requests)


def drafted(drafts: Sequence[int], request: Request) -> ScheduledRequest:
    return ScheduledRequest.next_of(request, request.num_tokens, tuple(drafts))


def undrafted(rows: torch.Tensor, **params: object) -> list[int]:
    """One token after another, from a row each."""
    output: list[int] = []
    for row in rows:
        output += sample(row[None], [make_request(output=output, **params)])
    return output


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
        {"frequency_penalty": 2.0, "presence_penalty": 1.0},
        {"repetition_penalty": 1.9, "temperature": 1.2},
    ],
)
@pytest.mark.parametrize("num_right", range(5))
def test_a_run_is_what_one_token_after_another_would_be(
    params: dict[str, object], num_right: int
) -> None:
    """Alike rows, so that noise or penalties of another position would give another token."""
    rows = logits(4, rows=5) * 0.05 + logits(5)
    wanted = undrafted(rows, **params)
    drafts = wanted[:4]
    if num_right < 4:
        drafts[num_right] += 1
    other = make_request(name="other", temperature=1.0)
    both = [drafted(drafts, make_request(**params)), drafted((), other)]
    run, alone = runs_of(torch.cat((rows, rows[:1])), both)
    assert list(run) == wanted[: num_right + 1]
    assert list(alone) == sample(rows[:1], [other])


def test_drafts_behind_a_wrong_one_are_not_looked_at() -> None:
    rows = torch.eye(4) * 9
    (run,) = runs_of(rows, [drafted((0, 3, 2), make_request())])
    assert run == (0, 1)
    (run,) = runs_of(rows, [drafted((0, 1, 2), make_request())])
    assert run == (0, 1, 2, 3)


@pytest.mark.parametrize("spread", [0.3, 2.0, 12.0])
def test_the_nucleus_is_the_same_where_nobody_may_look(spread: float) -> None:
    """As found on a device that nobody waits for, bit by bit, and by sorting."""
    rows = logits(3, rows=40) * spread
    rows[::3, ::2] = rows[::3, :1]  # many that are equal
    rows[1, 5:] = -torch.inf  # what other filters dropped
    top_p = torch.linspace(0.02, 1.0, 40)[:, None]
    by_sorting = rows.clone()
    sampler._drop_outside_nucleus(by_sorting, top_p)
    probabilities = rows.softmax(dim=-1)
    least = sampler._least_of_nucleus(probabilities, top_p)
    by_bits = rows.masked_fill(probabilities < least, -torch.inf)
    # Sums that come to the wanted mass within rounding may end at a neighbour.
    kept = [(by_sorting > -torch.inf).sum(dim=1), (by_bits > -torch.inf).sum(dim=1)]
    assert (kept[0] - kept[1]).abs().max() <= 1
    assert (kept[0] == kept[1]).float().mean() >= 0.9
    mass = probabilities.where(probabilities >= least, 0.0).sum(dim=1)
    assert (mass >= top_p[:, 0] - 1e-5).all()


def test_a_row_of_equal_tokens_is_its_own_nucleus() -> None:
    equal = torch.full((2, 8), 0.125)
    top_p = torch.tensor([[0.1], [1.0]])
    assert sampler._least_of_nucleus(equal, top_p).tolist() == [[0.125], [0.0]]
