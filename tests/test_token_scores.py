"""Logprobs of drawn tokens: exact, finite, one per token, and the same whatever the way to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from model_worker import token_scores
from model_worker.batch import ScheduledBatch, ScheduledRequest
from model_worker.protocol import SamplingParams, TokenLogprobs
from model_worker.sampler import Sampler
from model_worker.token_scores import MIN_LOGPROB, sampled_rows, score_rows, score_step
from tests.draft_kit import ScriptedSpeculator
from tests.models import VOCAB_SIZE
from tests.request_kit import make_request
from tests.rig import EngineRig, Reference, RigOptions
from tests.test_speculation_equality import SPOILS, knowing
from tests.test_token_equality import model_of, reference_of, shared_prefix_prompts, token_ids

NEW_TOKENS = 8
TOLERANCE = 2e-4


def some_logits(rows: int, vocab: int = 3000) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * 4


def score(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    return list(
        token_scores.entries_of(score_rows(logits, torch.tensor(token_ids), num_top), num_top)
    )


@pytest.mark.parametrize("num_top", [0, 1, 3, 20])
def test_values_ranks_and_order_are_those_of_the_distribution(num_top: int) -> None:
    logits = some_logits(4)
    exact = logits.double().log_softmax(-1)
    tokens = [5, 2999, 0, 17]
    for row, (entry, token) in enumerate(zip(score(logits, tokens, num_top), tokens, strict=True)):
        assert entry.logprob == pytest.approx(float(exact[row, token]), abs=1e-5)
        assert entry.rank == 1 + int((exact[row] > exact[row, token]).sum())
        best = exact[row].topk(num_top)
        assert entry.top_ids == tuple(best.indices.tolist())
        assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)


def test_the_likeliest_token_has_rank_one_and_heads_the_list() -> None:
    logits = some_logits(1)
    best = int(logits.argmax())
    (entry,) = score(logits, [best], 2)
    assert entry.rank == 1
    assert (entry.top_ids[0], entry.top_logprobs[0]) == (best, entry.logprob)


def test_half_precision_is_scored_in_single() -> None:
    logits = some_logits(2).bfloat16()
    assert score(logits, [1, 2], 4) == score(logits.float(), [1, 2], 4)


def test_what_has_no_logarithm_is_finite() -> None:
    logits = some_logits(1, vocab=8)
    logits[0, 3] = -torch.inf
    (entry,) = score(logits, [3], 8)
    assert (entry.logprob, entry.rank) == (MIN_LOGPROB, 8)
    assert entry.top_logprobs[-1] == MIN_LOGPROB
    (entry,) = score(torch.full((1, 8), torch.nan), [3], 2)
    assert entry.logprob == MIN_LOGPROB


def test_a_vocabulary_smaller_than_the_list_gives_all_of_it() -> None:
    (entry,) = score(some_logits(1, vocab=6), [0], 20)
    assert len(entry.top_ids) == len(entry.top_logprobs) == 6
    assert max(entry.top_logprobs) <= 0


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = some_logits(7)
    whole = score(logits, range(7), 5)
    monkeypatch.setattr(token_scores, "CHUNK_LOGITS", 2 * 3000)
    assert score(logits, range(7), 5) == whole


def mixed_batch() -> ScheduledBatch:
    """Two rows that score a prompt and one that is drawn from, one drawn row, three with drafts."""
    scoring = make_request([7, 8, 9], num_prompt_logprobs=1)
    plain = make_request([7, 8, 9], num_logprobs=0)
    drafted = make_request([7, 8, 9], num_logprobs=2)
    items = (
        ScheduledRequest.next_of(scoring, 3),
        ScheduledRequest.next_of(plain, 3),
        ScheduledRequest.next_of(drafted, 3, (4, 5)),
    )
    return ScheduledBatch(items, (), 0, 11)


def test_rows_are_told_apart_in_a_mixed_step() -> None:
    logits = some_logits(7)
    sampled = sampled_rows(mixed_batch(), logits)
    assert torch.equal(sampled, logits[[2, 3, 4, 5, 6]])
    pending = score_step(mixed_batch(), logits, sampled, torch.tensor([1, 2, 4, 6, 17]))
    assert pending is not None
    scores = pending.read(((1,), (2,), (4, 6)))
    assert scores[0].drawn == ()
    assert scores[0].prompt == (None, *score(logits[:2], [8, 9], 1))
    assert scores[1].drawn == tuple(score(logits[3:4], [2], 0))
    assert scores[2].drawn == tuple(score(logits[4:6], [4, 6], 2))
    assert scores[1].prompt == scores[2].prompt == ()


def test_nobody_asks_and_nothing_is_computed() -> None:
    batch = ScheduledBatch((ScheduledRequest.next_of(make_request(), 3),), (), 0, 3)
    logits = some_logits(1)
    assert sampled_rows(batch, logits) is logits
    assert score_step(batch, logits, logits, torch.tensor([1])) is None


# ---------------------------------------------------------------- through the engine


def entries_of(rig: EngineRig, name: str) -> list[TokenLogprobs]:
    for output in rig.outputs[name]:
        assert len(output.logprobs) == len(output.token_ids)
    return [entry for output in rig.outputs[name] for entry in output.logprobs]


def assert_right(entries: Sequence[TokenLogprobs], reference: Reference, num_top: int) -> None:
    exact = reference.logits.double().log_softmax(-1)
    assert len(entries) == len(reference.token_ids)
    for row, (entry, token) in enumerate(zip(entries, reference.token_ids, strict=True)):
        assert entry.logprob == pytest.approx(float(exact[row, token]), abs=TOLERANCE)
        assert entry.rank == 1
        assert len(entry.top_ids) == num_top
        best = exact[row].topk(num_top).values.tolist()
        assert entry.top_logprobs == pytest.approx(best, abs=TOLERANCE)
        for told, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            assert logprob == pytest.approx(float(exact[row, told]), abs=TOLERANCE)


def serve(
    rig: EngineRig, references: Mapping[str, Reference], num_logprobs: int | None = 3
) -> EngineRig:
    for name, wanted in references.items():
        params = SamplingParams(
            max_tokens=len(wanted.token_ids), temperature=0.0, num_logprobs=num_logprobs
        )
        rig.submit(name, wanted.prompt, params)
    rig.run()
    return rig


def wanted_answers(count: int = 4) -> dict[str, Reference]:
    prompts = shared_prefix_prompts(count)
    return {name: reference_of("llama", tuple(ids), NEW_TOKENS) for name, ids in prompts.items()}


@pytest.mark.parametrize(
    "options",
    [{}, {"chunk": 7}, {"is_caching": False}, {"num_blocks": 16, "chunk": 32}],
    ids=["cached", "chunked", "uncached", "preempted"],
)
@pytest.mark.parametrize("spoil", [None, "right", "partly", "wrong"])
def test_every_way_to_a_token_gives_its_logprob(options: dict[str, Any], spoil: str | None) -> None:
    wanted = wanted_answers()
    answers = {name: list(reference.token_ids) for name, reference in wanted.items()}
    speculator: ScriptedSpeculator | None = spoil and knowing(answers, SPOILS[spoil])
    settings = RigOptions(**{"block_size": 8, "max_model_len": 120, **options})
    rig = EngineRig(model_of("llama"), settings, Sampler(), speculator)
    for _ in range(2):  # the second time from the cache
        serve(rig, wanted)
        for name, reference in wanted.items():
            assert rig.tokens(name) == reference.token_ids
            assert_right(entries_of(rig, name), reference, 3)
        rig.outputs.clear()


def test_asking_changes_no_token() -> None:
    params = {"temperature": 1.0, "seed": 5, "top_p": 0.9, "frequency_penalty": 0.5}
    rig = EngineRig(model_of("qwen2"), RigOptions(), Sampler())
    for number, asked in enumerate((None, 0, 20)):
        for index in range(3):
            rig.submit(
                f"{index}.{number}",
                token_ids(30, seed=index),
                SamplingParams(max_tokens=20, num_logprobs=asked, **params),
            )
    rig.run()
    for index in range(3):
        plain = rig.tokens(f"{index}.0")
        assert rig.tokens(f"{index}.1") == rig.tokens(f"{index}.2") == plain
        assert rig.outputs[f"{index}.0"][-1].logprobs == ()
        few, many = entries_of(rig, f"{index}.1"), entries_of(rig, f"{index}.2")
        assert [entry.logprob for entry in few] == [entry.logprob for entry in many]
        assert all(entry.top_ids == () for entry in few)


def test_a_token_forced_by_bias_has_the_model_s_own_logprob() -> None:
    prompt = token_ids(20, seed=4)
    reference = reference_of("llama", tuple(prompt), 1)
    worst = int(reference.logits[0].argmin())
    rig = EngineRig(model_of("llama"), RigOptions(), Sampler())
    params = SamplingParams(
        max_tokens=1, temperature=0.0, logit_bias={worst: 100.0}, num_logprobs=1
    )
    rig.submit("a", prompt, params)
    rig.run()
    (entry,) = entries_of(rig, "a")
    assert rig.tokens("a") == (worst,)
    assert entry.rank == VOCAB_SIZE
    exact = reference.logits[0].double().log_softmax(-1)
    assert entry.logprob == pytest.approx(float(exact[worst]), abs=TOLERANCE)
    assert entry.top_ids == (int(exact.argmax()),)


@pytest.mark.parametrize("position", [0, 2, 5])
def test_a_stop_within_drafts_ends_the_entries_too(position: int) -> None:
    (reference,) = wanted_answers(1).values()
    speculator = knowing({"p0": list(reference.token_ids)}, SPOILS["right"])
    rig = EngineRig(model_of("llama"), RigOptions(), Sampler(), speculator)
    stop = reference.token_ids[position]
    first = reference.token_ids.index(stop)
    params = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0.0, num_logprobs=0, stop_token_ids=(stop,)
    )
    rig.submit("p0", reference.prompt, params)
    rig.run()
    assert rig.tokens("p0") == reference.token_ids[: first + 1]
    assert len(entries_of(rig, "p0")) == first + 1


def test_negative_control_a_wrong_block_shows_in_the_logprobs() -> None:
    (reference,) = wanted_answers(1).values()
    rig = EngineRig(model_of("llama"), RigOptions(block_size=8), Sampler())
    serve(rig, {"cold": reference})
    second, third = rig.block_ids_of(reference.prompt)[1:3]
    rig.tier.values[:, second] = rig.tier.values[:, third]
    serve(rig, {"warm": reference})
    with pytest.raises(AssertionError):
        assert_right(entries_of(rig, "warm"), reference, 3)
