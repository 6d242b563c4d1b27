"""Many sessions on a device too small for them: what their return costs, and others meanwhile.

    python -m benchmarks.pressure [--sessions N] [--tokens N] [--output FILE]

N sessions take turns, round robin, with device memory for a quarter of them; each return brings a
few new tokens. Time to first token of a return: computed again (no lower tier), from host memory,
from disk with the files in the page cache, and from disk with the page cache told to forget them.
Ideal: the new tokens' forward alone, measured on a session that never left the device. Then one
running answer's step time while promotions and demotions go on beside it, in turn with steps
without any.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine_kit import (
    build_parts,
    clear,
    random_ids,
    run,
    settle,
    step,
    submit,
    time_to_first_token,
)
from benchmarks.report import median_ms, print_table, save
from cache_store.events import Tier
from model_worker.build import WorkerParts, warm_up
from model_worker.engine import Engine
from model_worker.protocol import PrefixAction, PrefixCommand

NEW_TOKENS = 16
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 32
WINDOW_STEPS = 25
NUM_WINDOWS = 8


class Sessions:
    """``count`` histories of equal length that grow at each turn."""

    def __init__(self, count: int, num_tokens: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._turn = 10_000
        self.histories = [random_ids(num_tokens, vocab_size, seed) for seed in range(count)]

    def next_turn(self, number: int) -> np.ndarray:
        self._turn += 1
        new = random_ids(NEW_TOKENS, self._vocab_size, self._turn)
        self.histories[number] = np.concatenate((self.histories[number], new))
        return self.histories[number]


def build(sessions: int, tokens: int, **tiers: object) -> WorkerParts:
    """A device for a quarter of the sessions, at the size they grow to."""
    final = tokens + 4 * NEW_TOKENS
    blocks = sessions * -(-final // BLOCK_SIZE) // 4 + 2
    block_bytes = BLOCK_SIZE * 46_080  # of the demo model in float32
    parts = build_parts(
        max_model_len=min(MAX_MODEL_LEN, (blocks - 2) * BLOCK_SIZE),
        kv_cache_memory=blocks * block_bytes,
        block_size=BLOCK_SIZE,
        **tiers,
    )
    assert parts.loaded.kv_spec.bytes_per_block == block_bytes
    warm_up(parts)
    return parts


def returns(
    parts: WorkerParts, sessions: int, tokens: int, measured: int, before: Callable[[], None]
) -> dict[str, Any]:
    """TTFT of ``measured`` returns, after all sessions have had their first turn."""
    engine = parts.new_engine()
    chats = Sessions(sessions, tokens, parts.loaded.vocab_size)
    for number in range(sessions):
        submit(engine, f"first {number}", chats.histories[number], 1)
        run(engine)
    settle(engine)
    seconds, cached = [], []
    for number in range(measured):
        ids = chats.next_turn(number)
        before()
        elapsed, num_cached = time_to_first_token(engine, f"return {number}", ids)
        seconds.append(elapsed)
        cached.append(num_cached)
        settle(engine)
    engine.check_integrity()
    tiers = {
        each.tier.value: {"promoted": each.promoted_total, "recomputes": each.recomputes_total}
        for each in parts.cache.stats().tiers
    }
    return {
        "median_ms": median_ms(seconds),
        "max_ms": round(max(seconds) * 1000, 1),
        "median_cached_tokens": statistics.median(cached),
        "prompt_tokens": len(chats.histories[0]),
        "tiers": tiers,
    }


def resident(parts: WorkerParts, tokens: int) -> dict[str, Any]:
    """The ideal: returns of a session that stays on the device."""
    engine = parts.new_engine()
    chats = Sessions(1, tokens, parts.loaded.vocab_size)
    submit(engine, "first", chats.histories[0], 1)
    run(engine)
    seconds = [
        time_to_first_token(engine, f"return {number}", chats.next_turn(0))[0]
        for number in range(4)
    ]
    parts.cache.reset()
    return {"median_ms": median_ms(seconds)}


def beside_promotions(parts: WorkerParts, sessions: int, tokens: int) -> dict[str, float]:
    """One running answer's steps, in windows with and without transfers beside them."""
    engine = parts.new_engine()
    chats = Sessions(sessions, tokens, parts.loaded.vocab_size)
    num_moving = max(1, sessions // 8)
    for number in range(num_moving):
        submit(engine, f"first {number}", chats.histories[number], 1)
        run(engine)
    running = random_ids(tokens, parts.loaded.vocab_size, 77_777)
    submit(engine, "running", running, MAX_MODEL_LEN)
    while not step(engine)[1]:
        pass
    quiet: list[float] = []
    busy: list[float] = []
    num_moved, turn = 0, 0
    for _ in range(NUM_WINDOWS):
        settle(engine)
        quiet += [step(engine)[0] for _ in range(WINDOW_STEPS)]
        for _ in range(WINDOW_STEPS):
            if engine.stats().num_transfers == 0:
                history = chats.histories[turn // 2 % num_moving]
                action = PrefixAction.DEMOTE if turn % 2 == 0 else PrefixAction.PREFETCH
                num_moved += _act(engine, action, history)
                turn += 1
            busy.append(step(engine)[0])
    clear(engine)
    settle(engine)
    block_mib = parts.loaded.kv_spec.bytes_per_block / 2**20
    return {
        "quiet_step_ms": median_ms(quiet),
        "busy_step_ms": median_ms(busy),
        "ratio": round(statistics.median(busy) / statistics.median(quiet), 3),
        "moved_mib_per_busy_second": round(num_moved * block_mib / sum(busy), 1),
    }


def _act(engine: Engine, action: PrefixAction, history: np.ndarray) -> int:
    reply = engine.act_on_prefix(
        PrefixCommand(call_id="", action=action, prompt_token_ids=history.astype("<i4").tobytes())
    )
    return reply.num_blocks_changed


def forget_pages(folder: Path) -> None:
    """Tell the page cache to drop the files, so that the next read comes from the device."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--measured", type=int, default=20)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    sizes = (arguments.sessions, arguments.tokens)
    results: dict[str, Any] = {}
    nothing: Callable[[], None] = lambda: None  # noqa: E731

    parts = build(*sizes)
    results["resident"] = resident(parts, arguments.tokens)
    results["recompute"] = returns(parts, *sizes, arguments.measured // 2, nothing)
    del parts
    parts = build(*sizes, host_cache_size=4 * 2**30)
    results[Tier.HOST.value] = returns(parts, *sizes, arguments.measured, nothing)
    parts.cache.reset()
    results["beside_promotions"] = beside_promotions(parts, *sizes)
    parts.close()
    del parts
    for name, is_forgetful in (("disk, page cache", False), ("disk", True)):
        with tempfile.TemporaryDirectory(prefix="headstart-pressure-") as folder:
            parts = build(*sizes, disk_cache_dir=folder, disk_cache_size=8 * 2**30)
            before = (lambda: forget_pages(Path(folder))) if is_forgetful else nothing
            results[name] = returns(parts, *sizes, arguments.measured, before)
            parts.close()
            del parts

    again = results["recompute"]["median_ms"]
    rows = []
    for name, goal in (
        ("resident", ""),
        ("recompute", ""),
        ("host", "<= 0.125"),
        ("disk, page cache", "<= 0.25"),
        ("disk", "<= 0.25"),
    ):
        results[name]["ratio_to_recompute"] = round(results[name]["median_ms"] / again, 4)
        rows.append((name, results[name]["median_ms"], results[name]["ratio_to_recompute"], goal))
    print_table(rows, ("return of a session", "TTFT ms", "x recompute", "goal"))
    print(results["beside_promotions"], "goal: ratio <= 1.15")
    workload = (
        f"{arguments.sessions} sessions of {arguments.tokens} tokens, device memory for a quarter, "
        f"{NEW_TOKENS} new tokens a turn, demo model in float32"
    )
    save("pressure", workload, results, arguments.output)


if __name__ == "__main__":
    main()
