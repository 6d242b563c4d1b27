"""TTFT of a shared system prompt, cold and warm, against a bare forward of the same tokens.

    python -m benchmarks.shared_prefix [--rounds N] [--output FILE]

Workload: a system prompt of some 1,300 tokens and a question of some 30, one request at a time,
each round with a system prompt not seen before. Ideal: transformers' forward over contiguous KV,
of the whole prompt (cold), of the new tokens alone (warm). Engine figures run from submission to
the first token in this process; server figures from the request's first byte to the first content
at a client of `headstart serve`, over HTTP. Rounds alternate between all of them.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from benchmarks.bare import BareModel
from benchmarks.engine_kit import build_parts, time_to_first_token
from benchmarks.report import median_ms, print_table, save
from benchmarks.server_kit import Server, chat_ttft
from benchmarks.texts import QUESTIONS, system_prompt

NUM_WORDS = 1230  # some 1,300 tokens


def measure(rounds: int) -> dict[str, Any]:
    parts = build_parts()
    vocab = parts.loaded.vocab_size
    bare = BareModel()
    engine = parts.new_engine()
    seconds: dict[str, list[float]] = {}
    sizes: dict[str, list[int]] = {"prompt_tokens": [], "new_tokens": []}

    def note(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(value)

    with (
        Server() as cached,
        Server("--cache", "none") as uncached,
        httpx.Client(timeout=120) as web,
    ):
        for number in range(-1, rounds):  # the first round warms up and is dropped
            if number == 0:
                seconds.clear()
            text = system_prompt(NUM_WORDS, seed=number)
            for name, server in (("server", cached), ("server --cache none", uncached)):
                cold = chat_ttft(web, server, text, QUESTIONS[0])
                warm = chat_ttft(web, server, text, QUESTIONS[1])
                note(f"{name} cold", cold.ttft_s)
                note(f"{name} warm", warm.ttft_s)
                if server is cached:
                    total, new = warm.prompt_tokens, warm.prompt_tokens - warm.cached_tokens
            sizes["prompt_tokens"].append(total)
            sizes["new_tokens"].append(new)
            ids = np.random.default_rng(number + 9).integers(10, vocab, total, dtype=np.int32)
            other = ids.copy()
            other[-new:] = (other[-new:] + 1) % vocab
            note("engine cold", time_to_first_token(engine, "cold", ids)[0])
            warm_s, num_cached = time_to_first_token(engine, "warm", other)
            assert num_cached == total - new, (num_cached, total, new)
            note("engine warm", warm_s)
            cache = bare.cache(total + 8)
            note("bare whole", bare.forward(torch.from_numpy(ids).long()[None], cache, 0))
            tail = torch.from_numpy(other[-new:]).long()[None]
            note("bare new tokens", bare.forward(tail, cache, total - new))
    return {
        "median_ms": {name: median_ms(values) for name, values in seconds.items()},
        "rounds": rounds,
        **{name: statistics.median(values) for name, values in sizes.items()},
    }


GOALS = {
    "engine cold": ("bare whole", 1.15),
    "engine warm": ("bare new tokens", 1.3),
    "server cold": ("bare whole", 1.15),
    "server warm": ("bare new tokens", 1.3),
    "server --cache none cold": ("bare whole", None),
    "server --cache none warm": ("bare new tokens", None),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments.rounds)
    medians = results["median_ms"]
    rows = []
    for name, (ideal, goal) in GOALS.items():
        ratio = round(medians[name] / medians[ideal], 3)
        results.setdefault("ratio_to_ideal", {})[name] = ratio
        rows.append((name, medians[name], ideal, medians[ideal], ratio, goal or ""))
    print_table(rows, ("what", "ms", "ideal", "ideal ms", "ratio", "goal"))
    workload = f"{results['prompt_tokens']} prompt tokens, {results['new_tokens']} of them new"
    save("shared_prefix", workload, results, arguments.output)


if __name__ == "__main__":
    main()
