"""Decode speed with drafts and without, on the demo model.

    python -m benchmarks.speculation [--rounds N] [--tokens N] [--output FILE]

Workloads, greedy, with 1 and with 8 requests at a time:
- again: requests that were answered before, so that the tree has their answers;
- quote: a text to be repeated, in the prompt alone;
- chat: questions of MT-bench, each to its own end, nothing of them stored.

Two engines over one model and one cache, `--speculation off` and `auto`, each with its own measure
of what steps cost. Rounds alternate, which goes first too; the answers have to be the same. Speed
is tokens per second from the moment that all requests have their first token on; a loss shows as a
ratio below 1. Steps and drafts are counted beside, since they do not depend on the machine's load.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from transformers import AutoTokenizer

from benchmarks.engine_kit import LINK, build_parts, step
from benchmarks.report import print_table, save
from benchmarks.texts import QUESTIONS, system_prompt
from model_worker.build import WorkerParts, warm_up
from model_worker.engine import Engine
from model_worker.loader import resolve_model
from model_worker.pacer import PrefillPacer
from model_worker.protocol import AddRequest, SamplingParams

MODES = ("off", "auto")
GOALS = {"again": 2.0, "quote": 2.0, "chat": 0.98}
CHAT_FILE = Path(__file__).parent.parent / "tests" / "data" / "mt_bench_question.jsonl"
MAX_ITL_FACTOR = 2.0
MAX_BATCHED = 512


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    max_tokens: int
    ignore_eos: bool


@dataclass(frozen=True)
class Run:
    """One set of requests, served at once."""

    answers: tuple[tuple[int, ...], ...]
    tokens_per_s: float
    num_steps: int
    num_drafts: int
    num_accepted: int


class Prompts:
    """The workloads as token ids."""

    def __init__(self, num_tokens: int) -> None:
        source = resolve_model("demo", None, lambda line: None)
        self._tokenizer = AutoTokenizer.from_pretrained(source.folder)
        self._num_tokens = num_tokens
        lines = CHAT_FILE.read_text(encoding="utf-8").splitlines()
        self._questions = [json.loads(line)["turns"][0] for line in lines]

    def of(self, workload: str, batch: int, number: int) -> list[Prompt]:
        return [self._one(workload, batch * number + index) for index in range(batch)]

    def _one(self, workload: str, number: int) -> Prompt:
        if workload == "quote":
            text = system_prompt(self._num_tokens, seed=number)
            return self._prompt(f"{text}. {text}. {text[: len(text) // 9]}", is_chat=False)
        if workload == "again":
            return self._prompt(f"{QUESTIONS[number % 2]} Case {number}.", is_chat=True)
        return self._prompt(self._questions[number * 7 % len(self._questions)], is_chat=True)

    def _prompt(self, text: str, is_chat: bool) -> Prompt:
        if is_chat:
            messages = [{"role": "user", "content": text}]
            text = str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            )
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return Prompt(ids, self._num_tokens, ignore_eos=not is_chat)


def build_engines() -> tuple[WorkerParts, dict[str, Engine]]:
    parts = build_parts(kv_cache_memory=2**30, max_model_len=4096)
    engines = {}
    for mode in MODES:
        config = msgspec.structs.replace(parts.config, speculation=mode)
        pacer = PrefillPacer(MAX_ITL_FACTOR, MAX_BATCHED)
        own = dataclasses.replace(parts, config=config, pacer=pacer)
        warm_up(own)
        engines[mode] = own.new_engine()
    return parts, engines


def serve(engine: Engine, prompts: list[Prompt]) -> Run:
    for number, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=prompt.max_tokens, temperature=0.0, ignore_eos=prompt.ignore_eos
        )
        ids = np.asarray(prompt.token_ids, dtype="<i4").tobytes()
        request = AddRequest(request_id=str(number), prompt_token_ids=ids, sampling_params=params)
        engine.add_request(LINK, request)
    answers: list[list[int]] = [[] for _ in prompts]
    before = engine.stats()
    seconds, num_counted, num_steps = 0.0, 0, 0
    while engine.has_work:
        is_counted = all(answers)
        step_s, outputs = step(engine)
        for output in outputs:
            answers[int(output.request_id)] += output.token_ids
        if is_counted:
            seconds += step_s
            num_steps += 1
            num_counted += sum(len(output.token_ids) for output in outputs)
    after = engine.stats()
    return Run(
        tuple(map(tuple, answers)),
        num_counted / seconds if seconds else 0.0,
        num_steps,
        after.num_draft_tokens_total - before.num_draft_tokens_total,
        after.num_accepted_tokens_total - before.num_accepted_tokens_total,
    )


def measure(
    parts: WorkerParts, engines: dict[str, Engine], prompts: Prompts, workload: str, batch: int,
    rounds: int,
) -> dict[str, Any]:  # fmt: skip
    runs: dict[str, list[Run]] = {mode: [] for mode in MODES}
    num_equal = 0
    for number in range(rounds):
        asked = prompts.of(workload, batch, number)
        for mode in MODES if number % 2 else reversed(MODES):
            parts.cache.reset()
            if workload == "again":
                serve(engines["off"], asked)
            runs[mode].append(serve(engines[mode], asked))
        num_equal += runs["off"][-1].answers == runs["auto"][-1].answers
    pairs = zip(runs["off"], runs["auto"], strict=True)
    ratios = [auto.tokens_per_s / off.tokens_per_s for off, auto in pairs if off.tokens_per_s]
    return {
        "workload": workload,
        "requests": batch,
        **{
            f"{mode}_tokens_per_s": round(statistics.median(r.tokens_per_s for r in runs[mode]), 1)
            for mode in MODES
        },
        "ratio": round(statistics.median(ratios), 3),
        **{f"{mode}_steps": sum(run.num_steps for run in runs[mode]) for mode in MODES},
        "drafts": sum(run.num_drafts for run in runs["auto"]),
        "accepted": sum(run.num_accepted for run in runs["auto"]),
        "equal_answers": f"{num_equal}/{rounds}",
        "goal": GOALS[workload],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    parts, engines = build_engines()
    prompts = Prompts(arguments.tokens)
    results = []
    for workload in GOALS:
        for batch in (1, 8):
            rounds = arguments.rounds if batch == 1 else max(2, arguments.rounds // 2)
            results.append(measure(parts, engines, prompts, workload, batch, rounds))
            print_table([tuple(results[-1].values())], tuple(results[-1]))
    print_table([tuple(row.values()) for row in results], tuple(results[0]))
    workload = f"answers of up to {arguments.tokens} tokens, speculation off and auto in turn"
    save("speculation", workload, results, arguments.output)


if __name__ == "__main__":
    main()
