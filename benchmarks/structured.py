"""What it costs to bind answers by a grammar, on the demo model.

    python -m benchmarks.structured [--rounds N] [--tokens N] [--output FILE]

The same prompts, greedy, to the same number of tokens, free and bound by a JSON schema in turn;
with 1 and with 8 requests at a time, all of them bound. What is compared is the time of a step in
which all requests decode one token: the grammar's masks, their application, and following the
tokens are all within it. The goal is a ratio of at most 1.05.

Beside it: how long the first bound request of a worker waits for the tokenizer to be read, how long
a schema takes to compile once that is done, and how many of the bound answers keep to their schema
so far as they go (all).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.engine_kit import LINK, build_parts, random_ids, step
from benchmarks.report import print_table, save
from model_worker.engine import Engine
from model_worker.grammar import GrammarCompiler, TokenMatcher
from model_worker.loader import resolve_model
from model_worker.protocol import AddRequest, Grammar, SamplingParams

BATCHES = (1, 8)
GOAL = 1.05
PROMPT_TOKENS = 128

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "city": {"enum": ["Berlin", "Lisbon", "Oslo", "Porto", "Vienna"]},
                "code": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "city", "code"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "address", "tags", "active"],
    "additionalProperties": False,
}
SCHEMA: Mapping[str, Any] = {"type": "array", "items": _PERSON, "minItems": 50}


@dataclass(frozen=True)
class Run:
    """Seconds of each step in which all requests decoded, and the answers."""

    steps_s: tuple[float, ...]
    answers: tuple[tuple[int, ...], ...]


def serve(engine: Engine, batch: int, num_tokens: int, grammar: Grammar | None, seed: int) -> Run:
    for number in range(batch):
        prompt = random_ids(PROMPT_TOKENS, 40_000, seed=seed * 100 + number)
        params = SamplingParams(
            max_tokens=num_tokens, temperature=0.0, ignore_eos=True, grammar=grammar
        )
        ids = np.asarray(prompt, dtype="<i4").tobytes()
        request = AddRequest(request_id=str(number), prompt_token_ids=ids, sampling_params=params)
        engine.add_request(LINK, request)
    answers: list[list[int]] = [[] for _ in range(batch)]
    steps_s = []
    while engine.has_work:
        is_counted = all(answers)
        step_s, outputs = step(engine)
        for output in outputs:
            assert output.error is None, output.error
            answers[int(output.request_id)] += output.token_ids
        if is_counted and len(outputs) == batch:
            steps_s.append(step_s)
    return Run(tuple(steps_s), tuple(map(tuple, answers)))


def measure(engine: Engine, batch: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    serve(engine, batch, 8, grammar, seed=0)  # the tokenizer is read, the schema compiled
    runs: dict[bool, list[Run]] = {False: [], True: []}
    for number in range(rounds):
        for is_bound in (False, True) if number % 2 else (True, False):
            bound = grammar if is_bound else None
            runs[is_bound].append(serve(engine, batch, num_tokens, bound, seed=number + 1))
    pairs = zip(runs[False], runs[True], strict=True)
    ratios = [statistics.fmean(bound.steps_s) / statistics.fmean(free.steps_s)
              for free, bound in pairs]  # fmt: skip
    return {
        "requests": batch,
        "free_step_ms": mean_ms(runs[False]),
        "bound_step_ms": mean_ms(runs[True]),
        "ratio": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
        "valid_prefixes": f"{num_valid(runs[True])}/{rounds * batch}",
        "goal": GOAL,
    }


def mean_ms(runs: list[Run]) -> float:
    return round(statistics.fmean(s for run in runs for s in run.steps_s) * 1000, 3)


def num_valid(runs: list[Run]) -> int:
    """Answers that the schema's own matcher takes, token by token, from the beginning."""
    matcher = compiler().compile(Grammar("json_schema", json.dumps(SCHEMA)))
    return sum(follows(matcher.copy(), answer) for run in runs for answer in run.answers)


def follows(matcher: TokenMatcher, answer: tuple[int, ...]) -> bool:
    for token in answer:
        matcher.advance(token)
    return matcher.problem is None


def compiler() -> GrammarCompiler:
    source = resolve_model("demo", None, lambda line: None)
    tokenizer = AutoTokenizer.from_pretrained(source.folder)
    content = (source.folder / "tokenizer.json").read_bytes()
    return GrammarCompiler(content, len(tokenizer), [tokenizer.eos_token_id])


def compile_times(rounds: int) -> dict[str, float]:
    fresh = compiler()
    started = time.perf_counter()
    fresh.compile(Grammar("regex", "a"))
    read_s = time.perf_counter() - started
    seconds = []
    for number in range(rounds):
        schema = json.dumps({**SCHEMA, "title": str(number)})
        started = time.perf_counter()
        fresh.compile(Grammar("json_schema", schema))
        seconds.append(time.perf_counter() - started)
    return {
        "tokenizer_ms": round(read_s * 1000, 1),
        "schema_ms": round(statistics.median(seconds) * 1000, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    parts = build_parts(kv_cache_memory=2**29, max_model_len=2048, speculation="off")
    engine = parts.new_engine()
    steps = [measure(engine, batch, arguments.tokens, arguments.rounds) for batch in BATCHES]
    results = {"steps": steps, "compile": compile_times(20)}
    parts.close()
    print_table([tuple(row.values()) for row in steps], tuple(steps[0]))
    print_table([tuple(results["compile"].values())], tuple(results["compile"]))  # type: ignore[attr-defined]
    workload = (
        f"answers of {arguments.tokens} tokens to {PROMPT_TOKENS} random ones, greedy, free and "
        "bound by a nested JSON schema in turn"
    )
    save("structured", workload, results, arguments.output)


if __name__ == "__main__":
    main()
