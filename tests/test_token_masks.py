"""Masks of a step: what is forbidden is, what is not keeps its value, others are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model_worker.answer_end import Endings
from model_worker.batch import ScheduledRequest
from model_worker.logit_row import LogitRow
from model_worker.protocol import FinishReason, SamplingParams
from model_worker.request import Request
from model_worker.sampler import Sampler
from model_worker.sampling_params import Grammar
from model_worker.token_masks import masked
from tests.models import EOS_TOKEN_IDS, VOCAB_SIZE
from tests.request_kit import make_request
from tests.rig import EngineRig, RigOptions
from tests.test_grammar import PADDED, compiler, ids
from tests.test_speculation_equality import SPOILS, knowing
from tests.test_token_equality import model_of, reference_of, token_ids

ENDINGS = Endings(EOS_TOKEN_IDS)


def logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, PADDED, generator=torch.Generator().manual_seed(1))


def bounded(text: str, **fields: Any) -> Request:
    request = make_request(**fields)
    request.matcher = compiler().compile(Grammar("regex", text))
    return request


def row_of(request: Request, ahead: tuple[int, ...] = ()) -> LogitRow:
    return LogitRow(request, request.num_tokens, ahead)


def kept(row: torch.Tensor) -> set[int]:
    return set((row > -torch.inf).nonzero().flatten().tolist())


def test_nobody_is_bounded_and_nothing_is_touched() -> None:
    rows = logits(2)
    assert masked(rows, [row_of(make_request()), row_of(make_request())], ENDINGS) is rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_bounded_rows_change_and_only_where_they_must(dtype: torch.dtype) -> None:
    rows = logits(3).to(dtype)
    before = rows.clone()
    requests = [make_request(), bounded("th(at|e)"), make_request(min_tokens=1)]
    result = masked(rows, [row_of(request) for request in requests], ENDINGS)
    assert torch.equal(rows, before)
    assert torch.equal(result[0], before[0])
    assert kept(result[1]) == {ids(text)[0] for text in ("t", "th", "tha", "that", "the")}
    assert kept(result[2]) == set(range(PADDED)) - set(EOS_TOKEN_IDS)
    for row in (1, 2):
        numbers = sorted(kept(result[row]))
        assert torch.equal(result[row, numbers], before[row, numbers])


def test_no_end_before_the_minimum_and_any_from_it_on() -> None:
    request = make_request(output=(5, 6), min_tokens=4, stop_token_ids=(40, 33), ignore_eos=False)
    rows = [row_of(request, (7, 8, 9)[:count]) for count in range(4)]
    result = masked(logits(4), rows, ENDINGS)
    forbidden = [set(range(PADDED)) - kept(row) for row in result]
    assert forbidden == [{40, 33, *EOS_TOKEN_IDS}] * 2 + [set()] * 2


def test_an_end_that_is_ignored_anyway_may_be_drawn() -> None:
    request = make_request(min_tokens=4, stop_token_ids=(40,), ignore_eos=True)
    (row,) = masked(logits(1), [row_of(request)], ENDINGS)
    assert set(range(PADDED)) - kept(row) == {40}


def test_a_grammar_that_can_only_end_ends_before_the_minimum() -> None:
    request = bounded("(that)+", min_tokens=9)
    advance = ids("that")[0]
    request.append(advance)
    (row,) = masked(logits(1), [row_of(request)], ENDINGS)
    assert kept(row)
    assert not kept(row) & set(EOS_TOKEN_IDS)
    closed = bounded("that", min_tokens=9)
    closed.append(advance)
    (row,) = masked(logits(1), [row_of(closed)], ENDINGS)
    assert kept(row) == set(EOS_TOKEN_IDS)


def test_drafts_of_one_request_beside_another_s() -> None:
    one, other = bounded("that[0-9]"), bounded("[0-9]that")
    that, five = ids("that")[0], ids("5")[0]
    rows = [row_of(one), row_of(one, (that,)), row_of(other), row_of(other, (five,))]
    result = masked(logits(4), rows, ENDINGS)
    assert [that in kept(row) for row in result] == [True, False, False, True]
    assert [five in kept(row) for row in result] == [False, True, True, False]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.5},
        {"temperature": 1.0, "top_k": 400},
        {"temperature": 1.0, "top_p": 0.999},
        {"temperature": 1.0, "min_p": 0.01},
        {"temperature": 0.7, "repetition_penalty": 1.4, "presence_penalty": 2.0},
        {"temperature": 1.0, "logit_bias": {300: 100.0}},
    ],
    ids=str,
)
def test_whatever_else_is_asked_for_only_allowed_tokens_are_drawn(params: dict[str, Any]) -> None:
    requests = [bounded("[a-d]+", seed=seed, **params) for seed in range(40)]
    ending = [ScheduledRequest.next_of(request, request.num_tokens) for request in requests]
    drawn = Sampler(EOS_TOKEN_IDS).sample(logits(40), ending)
    (row,) = masked(logits(1), [row_of(bounded("[a-d]+"))], ENDINGS)
    assert set(drawn.tolist()) <= kept(row)
    assert 300 not in kept(row)


# ---------------------------------------------------------------- through the engine


def ending_rig(end: int, **options: Any) -> RigOptions:
    return RigOptions(block_size=8, max_model_len=200, eos_token_ids=(end,), **options)


@pytest.mark.parametrize("spoil", [None, "right", "partly", "wrong"])
@pytest.mark.parametrize("options", [{}, {"chunk": 7}, {"num_blocks": 14, "chunk": 32}], ids=str)
def test_an_answer_has_its_minimum_whatever_the_way(
    spoil: str | None, options: dict[str, Any]
) -> None:
    """The model's own third token is made the end: without a minimum the answer stops there."""
    prompts = {f"p{i}": token_ids(30 + i, seed=i) for i in range(4)}
    end = reference_of("llama", tuple(prompts["p0"]), 12).token_ids[2]
    plain = EngineRig(model_of("llama"), ending_rig(end), Sampler((end,)))
    params = SamplingParams(max_tokens=24, temperature=0.0, min_tokens=12)
    plain.submit("short", prompts["p0"], SamplingParams(max_tokens=24, temperature=0.0))
    for name, prompt in prompts.items():
        plain.submit(name, prompt, params)
    plain.run()
    assert plain.outputs["short"][-1].stop_token_id == end
    assert len(plain.tokens("short")) <= 3
    answers = {name: list(plain.tokens(name)) for name in prompts}
    for answer in answers.values():
        assert end not in answer[:12]
    speculator = spoil and knowing(answers, SPOILS[spoil])
    rig = EngineRig(model_of("llama"), ending_rig(end, **options), Sampler((end,)), speculator)
    for name, prompt in prompts.items():
        rig.submit(name, prompt, params)
    rig.run()
    assert {name: list(rig.tokens(name)) for name in prompts} == answers


def test_reasons_of_an_end() -> None:
    reason = ENDINGS.reason
    request = make_request(max_tokens=2, stop_token_ids=(9,))
    request.append(5)
    assert reason(request, 5) is None
    assert reason(request, 9) is reason(request, EOS_TOKEN_IDS[0]) is FinishReason.STOP
    request.append(5)
    assert reason(request, 5) is FinishReason.LENGTH
    ignoring = make_request(ignore_eos=True)
    assert reason(ignoring, EOS_TOKEN_IDS[0]) is None
    whole = bounded("that", ignore_eos=True)
    whole.append(ids("that")[0])
    assert reason(whole, ids("that")[0]) is FinishReason.STOP
    stop = FinishReason.STOP
    assert ENDINGS.stop_token_id(whole, (7, ids("that")[0]), stop) is None
    assert ENDINGS.stop_token_id(whole, (7, EOS_TOKEN_IDS[1]), stop) == EOS_TOKEN_IDS[1]
    assert ENDINGS.stop_token_id(whole, (7, EOS_TOKEN_IDS[1]), FinishReason.LENGTH) is None
    assert ENDINGS.stop_token_id(request, (5, 9), stop) == 9
    assert VOCAB_SIZE < PADDED
