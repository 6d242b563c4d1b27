"""Logprobs of prompts: one entry per token, computed honestly whatever the cache holds.

Case H4 of the known failures of other servers: a warm prefix must neither crash nor give stale or
missing numbers. Each token is scored exactly once, over chunks, preemptions and any cache.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from model_worker.protocol import FinishReason, SamplingParams, TokenLogprobs
from model_worker.request import NO_POSITIONS
from model_worker.sampler import Sampler
from model_worker.score_room import MAX_SCORED_LOGITS, ScoreRoom
from tests.request_kit import make_request
from tests.rig import EngineRig, RigOptions
from tests.scheduler_kit import World, prompt
from tests.test_token_equality import model_of, shared_prefix_prompts, token_ids

TOLERANCE = 2e-4


@cache
def exact_logprobs(family: str, ids: tuple[int, ...]) -> torch.Tensor:
    """(tokens, vocab): row i is what the model expects at position i + 1."""
    with torch.inference_mode():
        logits: torch.Tensor = model_of(family)(torch.tensor([ids])).logits[0]
    return logits.double().log_softmax(-1)


def entries_of(rig: EngineRig, name: str) -> list[TokenLogprobs | None]:
    return [entry for output in rig.outputs[name] for entry in output.prompt_logprobs]


def assert_right(
    rig: EngineRig, name: str, ids: list[int], num_top: int = 2, family: str = "llama"
) -> None:
    exact = exact_logprobs(family, tuple(ids))
    first, *entries = entries_of(rig, name)
    assert first is None
    assert len(entries) == len(ids) - 1
    for row, entry in enumerate(entries):
        assert entry is not None
        expected = exact[row, ids[row + 1]]
        assert entry.logprob == pytest.approx(float(expected), abs=TOLERANCE)
        assert abs(entry.rank - 1 - int((exact[row] > expected).sum())) <= 1
        best = exact[row].topk(num_top).values.tolist()
        assert entry.top_logprobs == pytest.approx(best, abs=TOLERANCE)


def scoring(max_tokens: int = 4, num_top: int = 2, **fields: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.0, num_prompt_logprobs=num_top, **fields
    )


@pytest.mark.parametrize("family", ["llama", "gpt-neox"])
@pytest.mark.parametrize("chunk", [4096, 7])
def test_cold_warm_and_changed(family: str, chunk: int) -> None:
    rig = EngineRig(model_of(family), RigOptions(block_size=8, chunk=chunk), Sampler())
    ids = token_ids(60, seed=2)
    changed = [*ids[:50], *token_ids(10, seed=3)]
    for name, prompt_ids in (("cold", ids), ("warm", ids), ("changed", changed), ("again", ids)):
        rig.submit(name, prompt_ids, scoring())
        rig.run()
        assert_right(rig, name, prompt_ids, family=family)
        assert rig.num_cached(name) == 0
    assert rig.tokens("cold") == rig.tokens("warm") == rig.tokens("again")
    # What was scored is stored as ever, and who asks for no scores reads it.
    rig.submit("plain", ids, SamplingParams(max_tokens=4, temperature=0.0))
    rig.run()
    assert rig.num_cached("plain") == 59
    assert rig.tokens("plain") == rig.tokens("cold")
    assert entries_of(rig, "plain") == []


@pytest.mark.parametrize("options", [{}, {"score_rows": 5}, {"is_caching": False}, {"chunk": 9}])
def test_many_at_once_beside_others(options: dict[str, Any]) -> None:
    """Those that score never wait for each other's blocks; the others do as ever."""
    rig = EngineRig(model_of("llama"), RigOptions(block_size=8, **options), Sampler())
    prompts = shared_prefix_prompts(5)
    for name, ids in prompts.items():
        rig.submit(name, ids, scoring())
        rig.submit(f"{name}.plain", ids, SamplingParams(max_tokens=4, temperature=0.0))
    rig.run()
    for name, ids in prompts.items():
        assert_right(rig, name, ids)
        assert rig.num_cached(name) == 0
        assert rig.tokens(name) == rig.tokens(f"{name}.plain")


def test_no_tokens_are_wanted_but_scores() -> None:
    rig = EngineRig(model_of("llama"), RigOptions(chunk=16), Sampler())
    ids = token_ids(40, seed=6)
    for name in ("cold", "warm"):
        rig.submit(name, ids, scoring(max_tokens=0))
        rig.run()
        assert_right(rig, name, ids)
        assert rig.tokens(name) == ()
        assert rig.outputs[name][-1].finish_reason is FinishReason.LENGTH


def test_a_prompt_of_one_token_has_one_empty_entry() -> None:
    rig = EngineRig(model_of("llama"), RigOptions(), Sampler())
    rig.submit("a", [17], scoring(num_logprobs=1))
    rig.run()
    assert entries_of(rig, "a") == [None]
    assert len(rig.tokens("a")) == 4


def test_preempted_in_the_middle_and_after() -> None:
    """A pool that holds hardly more than one of them, and few rows to score in a step."""
    options = RigOptions(
        block_size=8, num_blocks=12, chunk=24, max_model_len=120, score_rows=2, max_num_seqs=4
    )
    rig = EngineRig(model_of("llama"), options, Sampler())
    halfway = []
    requeue = rig.scheduler._requeue

    def noting(request: Any) -> None:
        halfway.append(0 < request.num_unscored_tokens < request.num_prompt_tokens)
        requeue(request)

    rig.scheduler._requeue = noting  # type: ignore[method-assign]
    prompts = {f"p{i}": token_ids(30 + 3 * i, seed=20 + i) for i in range(5)}
    for name, ids in prompts.items():
        rig.submit(name, ids, scoring(max_tokens=30))
    rig.run()
    assert {True, False} <= set(halfway)
    for name, ids in prompts.items():
        assert_right(rig, name, ids)


def test_drawn_tokens_and_the_prompt_are_scored_apart() -> None:
    rig = EngineRig(model_of("llama"), RigOptions(chunk=11), Sampler())
    ids = token_ids(30, seed=8)
    rig.submit("a", ids, scoring(num_logprobs=0))
    rig.run()
    assert_right(rig, "a", ids)
    answer = rig.tokens("a")
    exact = exact_logprobs("llama", (*ids, *answer))
    drawn = [entry for output in rig.outputs["a"] for entry in output.logprobs]
    expected = [float(exact[29 + i, token]) for i, token in enumerate(answer)]
    assert [entry.logprob for entry in drawn] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("seed", range(12))
def test_each_token_is_scored_once_whatever_happens(seed: int) -> None:
    """Arrivals, aborts and preemptions at random, in a pool that is too small."""
    random = np.random.default_rng(seed)
    world = World(int(random.integers(14, 30)), max_batched=int(random.integers(4, 20)))
    world.scheduler._score_room = ScoreRoom(MAX_SCORED_LOGITS // int(random.integers(1, 9)))
    lengths = {}
    for number in range(12):
        length = int(random.integers(1, 30))
        name = f"r{number}"
        asked = {} if number % 3 == 0 else {"num_prompt_logprobs": 0}
        lengths[name] = length if asked else 0
        world.add(name, prompt(length, seed=int(random.integers(3))), 12, **asked)
        for _ in range(int(random.integers(0, 4))):
            world.step()
    world.run()
    scored: dict[str, list[int]] = {name: [] for name in lengths}
    for batch in world.runner.batches:
        for item in batch.scheduled:
            scored[item.request.key.request_id] += item.scored
    for name, length in lengths.items():
        assert scored[name] == list(range(1, length))


def test_a_request_may_read_what_it_has_scored_already() -> None:
    request = make_request([1, 2, 3, 4, 5, 6], num_prompt_logprobs=0)
    assert len(request.matchable_token_ids) == 0
    assert request.scored_by(0, 4) == range(1, 5)
    request.has_scored(range(1, 5))  # the fifth row scores the last token
    assert len(request.matchable_token_ids) == 4
    assert request.scored_by(0, 4) == NO_POSITIONS
    assert request.scored_by(0, 6) == range(5, 6)
    assert request.scored_by(4, 2) == range(5, 6)
    request.has_scored(range(5, 6))
    assert len(request.matchable_token_ids) == 5
    assert request.scored_by(0, 6) == NO_POSITIONS


def test_the_room_of_a_step_is_shared_and_begun_anew() -> None:
    room = ScoreRoom(MAX_SCORED_LOGITS // 10)
    asking, other = make_request(num_prompt_logprobs=0), make_request()
    room.begin()
    assert [room.take(asking, 7), room.take(other, 100), room.take(asking, 7)] == [7, 100, 3]
    assert room.take(asking, 7) == 0
    room.begin()
    assert room.take(asking, 100) == 10


def test_a_vocabulary_beyond_the_bound_is_scored_row_by_row() -> None:
    room = ScoreRoom(2 * MAX_SCORED_LOGITS)
    room.begin()
    assert room.take(make_request(num_prompt_logprobs=0), 7) == 1
