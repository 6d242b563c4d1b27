"""Ranges of sampling parameters: each violation names its field."""

from __future__ import annotations

import math

import pytest

from model_worker.sampling_params import MAX_GRAMMAR_CHARS, Grammar, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", math.inf),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("max_tokens", -1),
        ("top_k", -1),
        ("seed", 2**63),
        ("stop_token_ids", (100,)),
        ("stop_token_ids", tuple(range(65))),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {5: math.nan}),
        ("num_logprobs", -1),
        ("num_logprobs", 21),
        ("num_prompt_logprobs", -1),
        ("num_prompt_logprobs", 21),
        ("min_tokens", -1),
        ("min_tokens", 2),
        ("grammar", Grammar("regex", "a" * (MAX_GRAMMAR_CHARS + 1))),
    ],
)
def test_out_of_range_is_named(field: str, value: object) -> None:
    params = SamplingParams(**{"max_tokens": 1, field: value})  # type: ignore[arg-type]
    violation = params.violation(vocab_size=100)
    assert violation is not None
    assert violation[0] == field


def test_the_message_names_id_and_vocabulary() -> None:
    violation = SamplingParams(max_tokens=1, logit_bias={49_200: 1.0}).violation(49_152)
    assert violation == ("logit_bias", "id 49200 is outside the vocabulary of 49152")


def test_the_edges_are_allowed() -> None:
    params = SamplingParams(
        max_tokens=1,
        temperature=2.0,
        top_p=1.0,
        min_p=1.0,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        seed=-(2**63),
        stop_token_ids=(0, 99),
        logit_bias={0: -100.0, 99: 100.0},
        num_logprobs=20,
        num_prompt_logprobs=0,
        min_tokens=1,
        grammar=Grammar("regex", "a" * MAX_GRAMMAR_CHARS),
    )
    assert params.violation(vocab_size=100) is None
