"""Answers bound by grammars: always valid when they end by themselves, and always the same ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import jsonschema
import pytest

from model_worker.grammar import GrammarCompiler
from model_worker.protocol import ErrorCode, FinishReason, Grammar, SamplingParams
from model_worker.sampler import Sampler
from tests.models import EOS_TOKEN_IDS, VOCAB_SIZE
from tests.rig import EngineRig, RigOptions
from tests.schema_kit import random_schema
from tests.test_grammar import COSTLY, ids, tokenizer
from tests.test_speculation_equality import SPOILS, knowing
from tests.test_token_equality import model_of, token_ids

NUM_SCHEMAS = 200


def options(**changes: Any) -> RigOptions:
    fields = {"block_size": 8, "max_model_len": 900, "eos_token_ids": EOS_TOKEN_IDS, **changes}
    return RigOptions(**fields)


def rig_of(rig_options: RigOptions, speculator: Any = None) -> EngineRig:
    return EngineRig(
        model_of("llama"),
        rig_options,
        Sampler(EOS_TOKEN_IDS),
        speculator,
        compile=unpadded().compile,
    )


@cache
def unpadded() -> GrammarCompiler:
    return GrammarCompiler(tokenizer().to_str().encode(), VOCAB_SIZE, EOS_TOKEN_IDS)


def text_of(rig: EngineRig, name: str) -> str:
    """Of the answer, without the token that ended it."""
    last = rig.outputs[name][-1]
    answer = rig.tokens(name)
    if last.stop_token_id is not None:
        assert answer[-1] == last.stop_token_id
        answer = answer[:-1]
    return str(tokenizer().decode(list(answer), skip_special_tokens=False))


def schema_grammar(schema: Mapping[str, Any]) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def test_two_hundred_random_schemas_are_obeyed() -> None:
    rig = rig_of(options(num_blocks=2000, max_num_seqs=64))
    schemas = {str(seed): random_schema(seed) for seed in range(NUM_SCHEMAS)}
    for name, schema in schemas.items():
        params = SamplingParams(
            max_tokens=400,
            temperature=1.0 if int(name) % 2 else 0.0,
            seed=int(name),
            grammar=schema_grammar(schema),
        )
        rig.submit(name, token_ids(12, seed=int(name) % 7), params)
    rig.run()
    reasons = {name: rig.outputs[name][-1].finish_reason for name in schemas}
    complete = [name for name, reason in reasons.items() if reason is FinishReason.STOP]
    assert set(reasons.values()) <= {FinishReason.STOP, FinishReason.LENGTH}
    assert len(complete) >= 0.97 * NUM_SCHEMAS
    for name in complete:
        jsonschema.validate(
            json.loads(text_of(rig, name)),
            schemas[name],
            cls=jsonschema.Draft202012Validator,
            format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
        )


GRAMMARS: Mapping[str, tuple[Grammar, Mapping[str, Any]]] = {
    "schema": (schema_grammar(random_schema(11)), {"temperature": 0.0}),
    "another": (schema_grammar(random_schema(26)), {"temperature": 0.0}),
    "regex": (Grammar("regex", "([a-z]{2,5} ){3,9}the end"), {"temperature": 0.0}),
    "lark": (
        Grammar("lark", 'start: sum\nsum: term ("+" term)*\nterm: /[0-9]{1,3}/ | "(" sum ")"'),
        {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.5},
    ),
    "endless": (Grammar("regex", "[a-z ]*"), {"temperature": 0.0}),
    "minimum": (
        Grammar("regex", "[a-z]+(,[a-z]+)*"),
        {"temperature": 1.0, "seed": 4, "min_tokens": 12},
    ),
    "free": (None, {"temperature": 0.0}),  # type: ignore[dict-item]
}


def serve(rig: EngineRig, num_rounds: int = 1) -> dict[str, tuple[int, ...]]:
    for _ in range(num_rounds):
        rig.outputs.clear()
        for number, (name, (grammar, params)) in enumerate(GRAMMARS.items()):
            own = SamplingParams(max_tokens=40, grammar=grammar, **params)
            rig.submit(name, token_ids(20 + 3 * number, seed=number), own)
        rig.run()
    return {name: rig.tokens(name) for name in GRAMMARS}


@cache
def plain_answers() -> dict[str, tuple[int, ...]]:
    return serve(rig_of(options(is_caching=False)))


@pytest.mark.parametrize("spoil", [None, *SPOILS])
@pytest.mark.parametrize(
    "changes",
    [{}, {"chunk": 9}, {"num_blocks": 16, "chunk": 32, "max_model_len": 110}],
    ids=["cached", "chunked", "preempted"],
)
def test_the_answer_is_the_same_whatever_the_way(
    spoil: str | None, changes: dict[str, Any]
) -> None:
    answers = plain_answers()
    speculator = spoil and knowing(answers, SPOILS[spoil])
    rig = rig_of(options(**changes), speculator)
    assert serve(rig, num_rounds=2) == answers
    if "num_blocks" in changes:
        assert rig.scheduler.counters.preemptions > 0
    if spoil == "right":
        assert speculator.num_accepted == speculator.num_drafts > 0


def test_a_complete_grammar_ends_the_answer_with_its_last_token() -> None:
    rig = rig_of(options())
    params = SamplingParams(
        max_tokens=50, temperature=0.0, ignore_eos=True, grammar=Grammar("regex", "that|which")
    )
    rig.submit("a", token_ids(20, seed=1), params)
    rig.run()
    assert text_of(rig, "a") in ("that", "which")
    last = rig.outputs["a"][-1]
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, None)


def test_an_answer_that_could_go_on_is_cut_by_its_length() -> None:
    rig = rig_of(options())
    params = SamplingParams(max_tokens=7, temperature=0.0, grammar=Grammar("regex", "[a-z]{300}"))
    rig.submit("a", token_ids(20, seed=1), params)
    rig.run()
    assert rig.outputs["a"][-1].finish_reason is FinishReason.LENGTH
    assert len(rig.tokens("a")) == 7


def test_constrained_tokens_have_finite_logprobs() -> None:
    rig = rig_of(options())
    params = SamplingParams(
        max_tokens=40, temperature=0.0, num_logprobs=3, grammar=Grammar("regex", "[0-9]{30}")
    )
    rig.submit("a", token_ids(20, seed=1), params)
    rig.run()
    entries = [entry for output in rig.outputs["a"] for entry in output.logprobs]
    assert len(entries) == len(rig.tokens("a"))
    assert all(-9999.0 <= entry.logprob <= 0 for entry in entries)
    assert any(entry.rank > 1 for entry in entries)


def test_bad_grammars_are_refused_and_the_others_served() -> None:
    rig = rig_of(options())
    for name, grammar in (
        ("bad", Grammar("json_schema", '{"type": "wrong"}')),
        ("good", Grammar("regex", "that")),
    ):
        rig.submit(name, token_ids(9, seed=1), SamplingParams(max_tokens=9, grammar=grammar))
    rig.run()
    error = rig.outputs["bad"][-1].error
    assert error is not None
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, "grammar")
    assert "Invalid type: wrong" in error.message
    assert text_of(rig, "good") == "that"


def test_a_grammar_that_costs_too_much_fails_its_own_request_alone() -> None:
    rig = rig_of(options())
    costly = Grammar("regex", COSTLY)
    bias = {ids("a")[0]: 100.0}
    rig.submit(
        "costly",
        token_ids(9, seed=1),
        SamplingParams(max_tokens=200, temperature=0.0, logit_bias=bias, grammar=costly),
    )
    rig.submit("plain", token_ids(9, seed=2), SamplingParams(max_tokens=200, temperature=0.0))
    rig.run()
    last = rig.outputs["costly"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert last.error.param == "grammar"
    assert rig.outputs["plain"][-1].error is None


def test_negative_control_without_masks_no_schema_is_obeyed() -> None:
    rig = rig_of(options())
    rig.submit("a", token_ids(12, seed=1), SamplingParams(max_tokens=60, temperature=0.0))
    rig.run()
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(text_of(rig, "a"))
