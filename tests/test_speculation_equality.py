"""The release gate with drafts: right, wrong, or right up to somewhere, the answer is the same.

Drafts are forced upon the engine by who knows the right answer. Greedy tokens and logits are held
to transformers' own generate; sampled answers to the engine's own without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from cache_store.cache import Cache
from model_worker.batch import ScheduledBatch, ScheduledRequest, StepResult
from model_worker.protocol import FinishReason, SamplingParams
from model_worker.request import Request
from model_worker.request_update import RequestUpdate
from model_worker.sampler import Sampler, accepted_runs
from model_worker.speculation import AdaptiveSpeculator
from model_worker.step_costs import StepCosts
from tests.draft_kit import ScriptedSpeculator, spoiled
from tests.models import FAMILIES, VOCAB_SIZE
from tests.rig import EngineRig, GateReport, RigOptions
from tests.test_token_equality import model_of, reference_of, shared_prefix_prompts, token_ids

NEW_TOKENS = 12
Spoil = Callable[[list[int], int], list[int]]
"""Makes drafts of the tokens that do come, at an output position."""

SPOILS: Mapping[str, Spoil] = {
    "right": lambda drafts, position: drafts[:5],
    "wrong": lambda drafts, position: spoiled(drafts[:3], 0, VOCAB_SIZE),
    "partly": lambda drafts, position: spoiled(drafts[:6], position * 7 % 5, VOCAB_SIZE),
    "now and then": lambda drafts, position: drafts[: position % 3],
}


def knowing(answers: Mapping[str, Sequence[int]], spoil: Spoil) -> ScriptedSpeculator:
    def guess(request: Request) -> list[int]:
        position = request.num_output_tokens
        return spoil(list(answers[request.key.request_id][position:]), position)

    return ScriptedSpeculator(guess)


def check(
    family: str,
    prompts: Mapping[str, list[int]],
    spoil: str,
    options: RigOptions,
    num_tokens: int = NEW_TOKENS,
) -> tuple[EngineRig, GateReport, ScriptedSpeculator]:
    wanted = {name: reference_of(family, tuple(ids), num_tokens) for name, ids in prompts.items()}
    answers = {name: reference.token_ids for name, reference in wanted.items()}
    speculator = knowing(answers, SPOILS[spoil])
    rig = EngineRig(model_of(family), options, speculator=speculator)
    report = rig.check(wanted)
    report.assert_passes()
    assert report.num_positions == len(prompts) * num_tokens
    return rig, report, speculator


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, spoil: str) -> None:
    rig, _, speculator = check(family, shared_prefix_prompts(3), spoil, RigOptions(block_size=8))
    counters = rig.scheduler.counters
    assert counters.draft_tokens == speculator.num_drafts > 0
    assert counters.accepted_tokens == speculator.num_accepted
    if spoil == "right":
        assert speculator.num_accepted == speculator.num_drafts
        assert counters.accepted_tokens == 3 * NEW_TOKENS - 3 * 2  # six tokens in each step
    if spoil == "wrong":
        assert speculator.num_accepted == 0


@pytest.mark.parametrize("spoil", ["right", "partly"])
@pytest.mark.parametrize("backend", ["cpu", "sdpa"])
@pytest.mark.parametrize("chunk", [2, 5, 17])
def test_beside_chunks_of_prompts(spoil: str, backend: str, chunk: int) -> None:
    options = RigOptions(block_size=8, chunk=chunk, max_num_seqs=chunk, backend=backend)
    check("llama", shared_prefix_prompts(4), spoil, options)


@pytest.mark.parametrize("spoil", SPOILS)
def test_preempted(spoil: str) -> None:
    options = RigOptions(block_size=8, num_blocks=16, chunk=32, max_model_len=120)
    prompts = {f"p{i}": token_ids(40 + 3 * i, seed=20 + i) for i in range(5)}
    rig, _, _ = check("llama", prompts, spoil, options, num_tokens=24)
    assert rig.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("spoil", SPOILS)
def test_cache_off(spoil: str) -> None:
    check("llama", shared_prefix_prompts(4), spoil, RigOptions(is_caching=False, chunk=50))


def test_the_next_turn_reads_nothing_of_what_was_rejected() -> None:
    """Drafts that fill blocks beyond the answer, all wrong; then a prompt that goes on from it."""
    prompt = token_ids(45, seed=2)
    first = reference_of("llama", tuple(prompt), NEW_TOKENS)
    turn = [*prompt, *first.token_ids, *token_ids(9, seed=3)]
    second = reference_of("llama", tuple(turn), NEW_TOKENS)
    references = {"first": first, "second": second}
    answers = {name: [*wanted.token_ids, *range(40)] for name, wanted in references.items()}

    def spoil(drafts: list[int], position: int) -> list[int]:
        return spoiled(drafts[:30], 0, VOCAB_SIZE)

    rig = EngineRig(model_of("llama"), RigOptions(block_size=4), speculator=knowing(answers, spoil))
    for name, wanted in references.items():
        rig.check({name: wanted}).assert_passes()
    assert rig.num_cached("second") == 45 + NEW_TOKENS - 1


SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 0.9, "seed": 6, "top_p": 0.8, "top_k": 30, "min_p": 0.02},
    "penalised": {
        "temperature": 0.0,
        "presence_penalty": 1.5,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.3,
    },
    "all of it": {
        "temperature": 1.3,
        "seed": 7,
        "top_p": 0.95,
        "frequency_penalty": 0.7,
        "logit_bias": {17: 3.0, 40: -9.0},
    },
}


def serve(
    speculator: ScriptedSpeculator | None, stops: Mapping[str, tuple[int, ...]], options: RigOptions
) -> EngineRig:
    """All kinds of sampling in one batch."""
    rig = EngineRig(model_of("qwen2"), options, Sampler(), speculator)
    for number, (name, params) in enumerate(SAMPLINGS.items()):
        own = SamplingParams(max_tokens=24, stop_token_ids=stops.get(name, ()), **params)
        rig.submit(name, token_ids(20 + 7 * number, seed=number), own)
    rig.run()
    return rig


@cache
def plain_answers() -> dict[str, tuple[int, ...]]:
    rig = serve(None, {}, RigOptions(block_size=8))
    return {name: rig.tokens(name) for name in SAMPLINGS}


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 16, "chunk": 32}, {"chunk": 9}, {"chunk": 9, "runs_ahead": True}]
)
def test_sampled_answers_stay_the_same(spoil: str, options: dict[str, int]) -> None:
    answers = plain_answers()
    rig = serve(
        knowing(answers, SPOILS[spoil]),
        {},
        RigOptions(**{"block_size": 8, "max_model_len": 100, **options}),  # type: ignore[arg-type]
    )
    assert {name: rig.tokens(name) for name in SAMPLINGS} == answers


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("position", [0, 3, 4, 11])
def test_stop_tokens_end_at_the_same_place(spoil: str, position: int) -> None:
    answers = plain_answers()
    stops = {name: (answer[position],) for name, answer in answers.items()}
    rig = serve(knowing(answers, SPOILS[spoil]), stops, RigOptions(block_size=8))
    for name, answer in answers.items():
        end = answer.index(answer[position])
        assert rig.tokens(name) == answer[: end + 1]
        assert rig.outputs[name][-1].finish_reason is FinishReason.STOP
        assert rig.outputs[name][-1].stop_token_id == answer[end]


def in_earnest(cache: Cache, costs: StepCosts) -> AdaptiveSpeculator:
    """Told what steps cost, since a busy machine may find at any time that drafts do not pay."""
    told = StepCosts()
    told.record(1, 0, 0.040)
    told.record(0, 100, 0.240)
    return AdaptiveSpeculator(cache, told, lambda: 0.0)


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt-neox"])
@pytest.mark.parametrize(
    "options",
    [{}, {"is_caching": False}, {"num_blocks": 24, "chunk": 20}, {"runs_ahead": True}],
)
def test_drafts_in_earnest(family: str, options: dict[str, Any]) -> None:
    """Answers given three times: cold, out of the tree, and after evictions, side by side."""
    options = {"block_size": 8, "max_model_len": 160, **options}
    rig = EngineRig(model_of(family), RigOptions(**options), speculator=in_earnest)
    for turn in range(3):
        wanted = {
            f"{name}.{turn}": reference_of(family, tuple(ids), 24)
            for name, ids in shared_prefix_prompts(4).items()
        }
        rig.check(wanted).assert_passes()
    if options.get("is_caching", True):
        assert rig.scheduler.counters.accepted_tokens >= 24
    stats = rig.engine.stats()
    assert stats.num_accepted_tokens_total <= stats.num_draft_tokens_total


class BelievingSampler(Sampler):
    """Takes the first wrong draft that it sees for right, once."""

    def __init__(self) -> None:
        super().__init__()
        self.has_erred = False

    def sample(self, logits: torch.Tensor, ending: Sequence[ScheduledRequest]) -> torch.Tensor:
        drawn = super().sample(logits, ending)
        first = 0
        for item, run in zip(ending, accepted_runs(ending, drawn.tolist()), strict=True):
            if len(run) <= len(item.draft_token_ids) and not self.has_erred:
                self.has_erred = True
                drawn[first + len(run) - 1] = item.draft_token_ids[len(run) - 1]
            first += item.num_logit_rows
        return drawn


def test_negative_control_one_wrong_draft_that_is_accepted_fails() -> None:
    """Of the tokens: one wrong draft among right ones, believed once, changes the answer."""
    prompt = token_ids(45, seed=2)
    wanted = reference_of("llama", tuple(prompt), NEW_TOKENS)
    for sampler in (Sampler(), BelievingSampler()):
        speculator = knowing({"a": wanted.token_ids}, SPOILS["partly"])
        rig = EngineRig(model_of("llama"), RigOptions(), sampler, speculator)
        rig.submit("a", prompt, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))
        rig.run()
        is_same = rig.tokens("a") == wanted.token_ids
        assert is_same == (not isinstance(sampler, BelievingSampler))


def test_negative_control_a_rejected_row_that_counts_fails_the_gate() -> None:
    """Of the KV: a wrong draft's row stays where the right token's belongs."""
    prompt = token_ids(45, seed=2)
    wanted = reference_of("llama", tuple(prompt), NEW_TOKENS)
    speculator = knowing({"a": wanted.token_ids}, SPOILS["wrong"])
    rig = EngineRig(model_of("llama"), RigOptions(), speculator=speculator)
    update = rig.scheduler.update

    def counting_one_more(batch: ScheduledBatch, result: StepResult) -> list[RequestUpdate | None]:
        updates = update(batch, result)
        request = batch.scheduled[0].request
        if request.num_output_tokens == 3:
            request.append(wanted.token_ids[3])
            request.num_computed_tokens += 1
        return updates

    rig.scheduler.update = counting_one_more  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        rig.check({"a": wanted}).assert_passes()
