"""What one tenant's flood does to another's time to first token and hit rate.

    python -m benchmarks.fairness [--turns N] [--output FILE]

Tenant B has conversations that go on one turn at a time, each with new tokens behind what it was
answered before, and all of them fit into half of the device. Tenant A keeps 32 prompts in flight,
none of them ever repeated. B's TTFT runs from the moment that its turn is due, whatever the engine
is doing then, to the first token; its hit rate is cached tokens to prompt tokens over all turns. In
turn: B alone, B beside A, and for contrast both as one tenant.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine_kit import LINK, build_parts, random_ids, step, submit
from benchmarks.report import print_table, save
from model_worker.build import WorkerParts, warm_up
from model_worker.engine import Engine

BLOCK_SIZE = 32
BLOCK_BYTES = BLOCK_SIZE * 46_080  # of the demo model in float32
NUM_CHATS = 4
FIRST_TOKENS = 480  # of a conversation's first prompt
NEW_TOKENS = 128  # of each turn
ANSWER_TOKENS = 8
FLOOD_CONCURRENT = 32
FLOOD_TOKENS = 512
FLOOD_ANSWER_TOKENS = 32
CONTRAST_TURNS = 4  # each of them waits for the whole flood
GAP_S = (0.05, 0.8)  # from an answer to the next turn
MAX_TTFT_RATIO = 2.0
MAX_HIT_RATE_LOSS = 0.05


@dataclass
class Turns:
    """What came of B's turns."""

    ttft_s: list[float] = field(default_factory=list)
    num_cached: int = 0
    num_prompt: int = 0

    def figures(self) -> dict[str, float]:
        return {
            "turns": len(self.ttft_s),
            "ttft_p50_ms": round(statistics.median(self.ttft_s) * 1000, 1),
            "ttft_p95_ms": round(float(np.percentile(self.ttft_s, 95)) * 1000, 1),
            "hit_rate": round(self.num_cached / self.num_prompt, 4),
        }


class Chats:
    """B's conversations, which take turns."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._vocab_size = vocab_size
        self._histories = [
            random_ids(FIRST_TOKENS, vocab_size, seed * 1000 + number)
            for number in range(NUM_CHATS)
        ]
        self._number = -1

    def next_prompt(self) -> np.ndarray:
        self._number = (self._number + 1) % NUM_CHATS
        new = self._rng.integers(10, self._vocab_size, NEW_TOKENS, dtype=np.int32)
        self._histories[self._number] = np.concatenate((self._histories[self._number], new))
        return self._histories[self._number]

    def answered(self, token_ids: list[int]) -> None:
        answer = np.array(token_ids, dtype=np.int32)
        self._histories[self._number] = np.concatenate((self._histories[self._number], answer))

    def gap_s(self) -> float:
        return float(self._rng.uniform(*GAP_S))


class Flood:
    """A's prompts: as many as are in flight are replaced as they end."""

    def __init__(self, engine: Engine, vocab_size: int, tenant: str) -> None:
        self._engine = engine
        self._rng = np.random.default_rng(99)
        self._vocab_size = vocab_size
        self._tenant = tenant
        self._num_sent = 0
        self.num_ended = 0
        self.started_s = time.perf_counter()

    def top_up(self) -> None:
        while self._num_sent - self.num_ended < FLOOD_CONCURRENT:
            ids = self._rng.integers(10, self._vocab_size, FLOOD_TOKENS, dtype=np.int32)
            name = f"flood {self._num_sent}"
            submit(
                self._engine, name, ids, FLOOD_ANSWER_TOKENS, tenant=self._tenant, cache_salt="a"
            )
            self._num_sent += 1


def play(
    engine: Engine, chats: Chats, num_turns: int, tenant: str, flood: Flood | None = None
) -> Turns:
    """``num_turns`` turns of B's, beside the flood if there is one."""
    turns = Turns()
    due_s = time.perf_counter() + chats.gap_s()
    prompt: np.ndarray | None = None
    answer: list[int] = []
    while len(turns.ttft_s) < num_turns or prompt is not None:
        if flood is not None:
            flood.top_up()
        if prompt is None and time.perf_counter() >= due_s:
            prompt, answer = chats.next_prompt(), []
            submit(engine, "turn", prompt, ANSWER_TOKENS, tenant=tenant, cache_salt="b")
        if not engine.has_work:
            time.sleep(max(0.0, due_s - time.perf_counter()))
            continue
        for output in step(engine)[1]:
            assert output.error is None, output.error
            if output.request_id != "turn":
                assert flood is not None
                flood.num_ended += output.finish_reason is not None
                continue
            assert prompt is not None
            if output.num_cached_tokens is not None:
                turns.num_cached += output.num_cached_tokens
                turns.num_prompt += len(prompt)
            if output.token_ids and not answer:
                turns.ttft_s.append(time.perf_counter() - due_s)
            answer += output.token_ids
            if output.finish_reason is not None:
                chats.answered(answer)
                prompt = None
                due_s = time.perf_counter() + chats.gap_s()
    return turns


def begin(parts: WorkerParts, seed: int, tenant: str) -> tuple[Engine, Chats]:
    """An empty cache, and B's conversations after their first turns."""
    parts.cache.reset()
    engine = parts.new_engine()
    chats = Chats(parts.loaded.vocab_size, seed)
    play(engine, chats, NUM_CHATS, tenant)
    return engine, chats


def beside_flood(
    parts: WorkerParts, seed: int, tenants: tuple[str, str], num_turns: int
) -> dict[str, float]:
    engine, chats = begin(parts, seed, tenants[0])
    flood = Flood(engine, parts.loaded.vocab_size, tenants[1])
    flood.top_up()
    while flood.num_ended < 2:  # it is in full swing
        for output in step(engine)[1]:
            flood.num_ended += output.finish_reason is not None
        flood.top_up()
    turns = play(engine, chats, num_turns, tenants[0], flood)
    seconds = time.perf_counter() - flood.started_s
    stats = engine.stats()
    engine.check_integrity()
    engine.abort_link(LINK)
    return {
        **turns.figures(),
        "flood_prompts_per_minute": round(flood.num_ended / seconds * 60, 1),
        "preemptions": stats.preemptions_total,
    }


def measure(num_turns: int) -> dict[str, Any]:
    final_tokens = FIRST_TOKENS + (2 + num_turns // NUM_CHATS) * (NEW_TOKENS + ANSWER_TOKENS)
    num_blocks = int(2.2 * NUM_CHATS * -(-final_tokens // BLOCK_SIZE))
    parts = build_parts(
        block_size=BLOCK_SIZE,
        kv_cache_memory=num_blocks * BLOCK_BYTES,
        max_model_len=min(8192, final_tokens + 2 * NEW_TOKENS),
        speculation="off",
    )
    assert parts.loaded.kv_spec.bytes_per_block == BLOCK_BYTES
    warm_up(parts)
    engine, chats = begin(parts, 1, "b")
    alone = play(engine, chats, num_turns, "b").figures()
    fair = beside_flood(parts, 2, ("b", "a"), num_turns)
    one = beside_flood(parts, 3, ("", ""), min(num_turns, CONTRAST_TURNS))
    results: dict[str, Any] = {
        "alone": alone,
        "beside a flood": fair,
        "beside a flood, as one tenant": one,
        "blocks": num_blocks,
        "goals": {"ttft_ratio": MAX_TTFT_RATIO, "hit_rate_loss": MAX_HIT_RATE_LOSS},
    }
    for name, run in (("fair", fair), ("one", one)):
        results[f"{name}_ttft_p50_ratio"] = round(run["ttft_p50_ms"] / alone["ttft_p50_ms"], 2)
        results[f"{name}_ttft_p95_ratio"] = round(run["ttft_p95_ms"] / alone["ttft_p95_ms"], 2)
        results[f"{name}_hit_rate_loss"] = round(alone["hit_rate"] - run["hit_rate"], 4)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments.turns)
    names = ("alone", "beside a flood", "beside a flood, as one tenant")
    columns = ("turns", "ttft_p50_ms", "ttft_p95_ms", "hit_rate", "flood_prompts_per_minute")
    print_table(
        [(name, *(results[name].get(column, "") for column in columns)) for name in names],
        ("tenant B", "turns", "TTFT p50 ms", "TTFT p95 ms", "hit rate", "A's prompts per minute"),
    )
    for figure, goal in (("ttft_p50_ratio", 2.0), ("ttft_p95_ratio", 2.0), ("hit_rate_loss", 0.05)):
        print(f"{figure}: {results[f'fair_{figure}']} (as one tenant {results[f'one_{figure}']}), "
              f"goal <= {goal}")  # fmt: skip
    workload = (
        f"B: {NUM_CHATS} conversations of {FIRST_TOKENS} tokens, {NEW_TOKENS} more at each turn; "
        f"A: {FLOOD_CONCURRENT} prompts of {FLOOD_TOKENS} tokens in flight, never repeated, "
        f"{FLOOD_ANSWER_TOKENS} tokens answered to each; demo model in float32"
    )
    save("fairness", workload, results, arguments.output)


if __name__ == "__main__":
    main()
