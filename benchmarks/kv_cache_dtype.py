"""The same memory with KV as it is computed and as int8: what fits, what is found, what it costs.

    python -m benchmarks.kv_cache_dtype [--sessions N] [--tokens N] [--output FILE]

Three measurements, float32 and int8 in turn wherever time is taken:

- N sessions of the demo model take turns, round robin, with float32 memory for a quarter of them:
  how many conversations fit, tokens found, and the time to first token of a return;
- what int8 costs where memory is no question: the same return, and a step of one running answer;
- tau-bench's recorded chats against devices of equal bytes, as in session_replay: tokens found.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.engine_kit import build_parts, run, step, submit, time_to_first_token
from benchmarks.pressure import BLOCK_SIZE, MAX_MODEL_LEN, NEW_TOKENS, Sessions
from benchmarks.report import median_ms, print_table, save
from benchmarks.session_replay import FILE, load_arrivals, peak_live_tokens, replay
from benchmarks.traces import DATA
from model_worker.build import WorkerParts, warm_up
from model_worker.engine import Engine

DTYPES = ("auto", "int8")
BLOCK_BYTES = BLOCK_SIZE * 46_080  # of the demo model in float32
WINDOW_STEPS = 20
NUM_WINDOWS = 4


def build(dtype: str, sessions: int, tokens: int) -> WorkerParts:
    """float32 memory for a quarter of the sessions, at the size that they grow to."""
    blocks = sessions * -(-(tokens + 4 * NEW_TOKENS) // BLOCK_SIZE) // 4 + 2
    parts = build_parts(
        max_model_len=min(MAX_MODEL_LEN, (blocks - 2) * BLOCK_SIZE),
        kv_cache_memory=blocks * BLOCK_BYTES,
        block_size=BLOCK_SIZE,
        kv_cache_dtype=dtype,
    )
    warm_up(parts)
    return parts


def pressure(
    parts: dict[str, WorkerParts], sessions: int, tokens: int, measured: int
) -> dict[str, Any]:
    """Returns of more sessions than float32 holds, the two formats in turn."""
    engines = {name: each.new_engine() for name, each in parts.items()}
    vocab_size = parts["auto"].loaded.vocab_size
    chats = {name: Sessions(sessions, tokens, vocab_size) for name in parts}
    for name, engine in engines.items():
        for number in range(sessions):
            submit(engine, f"first {number}", chats[name].histories[number], 1)
            run(engine)
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    found = dict.fromkeys(parts, 0)
    asked = dict.fromkeys(parts, 0)
    for number in range(measured):
        for name, engine in engines.items():
            ids = chats[name].next_turn(number % sessions)
            elapsed, num_cached = time_to_first_token(engine, f"return {number}", ids)
            seconds[name].append(elapsed)
            found[name] += num_cached
            asked[name] += len(ids)
    return {
        name: {
            "bytes_per_token": each.loaded.kv_spec.bytes_per_token,
            "blocks": each.bill.num_blocks,
            "sessions_that_fit": each.bill.num_tokens // (tokens + 4 * NEW_TOKENS),
            "token_hit_rate": round(found[name] / asked[name], 4),
            "ttft_median_ms": median_ms(seconds[name]),
        }
        for name, each in parts.items()
    }


def cost(parts: dict[str, WorkerParts], tokens: int) -> dict[str, Any]:
    """One session that is resident in both formats: its returns, then a running answer's steps."""
    engines: dict[str, Engine] = {}
    chats = {}
    for name, each in parts.items():
        each.cache.reset()
        engines[name] = each.new_engine()
        chats[name] = Sessions(1, tokens, each.loaded.vocab_size)
        submit(engines[name], "first", chats[name].histories[0], 1)
        run(engines[name])
    returns: dict[str, list[float]] = {name: [] for name in parts}
    steps: dict[str, list[float]] = {name: [] for name in parts}
    for number in range(4):
        for name, engine in engines.items():
            ids = chats[name].next_turn(0)
            returns[name].append(time_to_first_token(engine, f"return {number}", ids)[0])
    for name, engine in engines.items():
        submit(engine, "running", chats[name].histories[0], NUM_WINDOWS * WINDOW_STEPS + 10)
        while not step(engine)[1]:
            pass
    for _ in range(NUM_WINDOWS):
        for name, engine in engines.items():
            steps[name] += [step(engine)[0] for _ in range(WINDOW_STEPS)]
    result: dict[str, Any] = {
        name: {"resident_ttft_ms": median_ms(returns[name]), "step_ms": median_ms(steps[name])}
        for name in parts
    }
    result["step_ratio"] = round(
        statistics.median(steps["int8"]) / statistics.median(steps["auto"]), 3
    )
    return result


def recorded_chats(parts: dict[str, WorkerParts], limit: int | None) -> dict[str, Any]:
    """Hit rate with float32 memory for an eighth of the KV that is live at the chats' peak."""
    arrivals = load_arrivals(DATA / FILE, limit)
    longest = max(len(arrival.prompt) for arrival in arrivals)
    blocks = max(peak_live_tokens(arrivals) // BLOCK_SIZE // 8, longest // BLOCK_SIZE + 2)
    result: dict[str, Any] = {"memory_bytes": blocks * BLOCK_BYTES}
    for name, each in parts.items():
        num_blocks = each.loaded.kv_spec.num_blocks_in(blocks * BLOCK_BYTES)
        result[name] = replay(arrivals, num_blocks, 0, speed_up=100.0)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--measured", type=int, default=20)
    parser.add_argument("--limit", type=int, help="recorded chats, all by default")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    sizes = (arguments.sessions, arguments.tokens)
    parts = {dtype: build(dtype, *sizes) for dtype in DTYPES}
    results: dict[str, Any] = {
        "pressure": pressure(parts, *sizes, arguments.measured),
        "cost": cost(parts, arguments.tokens),
        "recorded_chats": recorded_chats(parts, arguments.limit),
    }
    rows = [
        (
            name,
            results["pressure"][name]["sessions_that_fit"],
            results["pressure"][name]["token_hit_rate"],
            results["pressure"][name]["ttft_median_ms"],
            results["cost"][name]["resident_ttft_ms"],
            results["cost"][name]["step_ms"],
            results["recorded_chats"][name]["token_hit_rate"],
        )
        for name in DTYPES
    ]
    header = (
        "KV", "sessions", "hit rate", "TTFT ms", "resident TTFT ms", "step ms", "chats hit rate",
    )  # fmt: skip
    print_table(rows, header)
    workload = (
        f"{arguments.sessions} sessions of {arguments.tokens} tokens in float32 memory for a "
        f"quarter, {NEW_TOKENS} new tokens a turn, demo model; tau-bench airline chats on an eighth"
    )
    save("kv_cache_dtype", workload, results, arguments.output)


if __name__ == "__main__":
    main()
