"""A replay of recorded tool-calling chats against a device too small for all of them.

    python -m benchmarks.session_replay [--speed-up X] [--output FILE]

The chats of tau-bench's airline domain (200 sessions, 2,454 requests) are templated and tokenized
with the demo model's tokenizer and sent to a real engine, scheduler and cache at their recorded
times, think times shortened ``--speed-up`` fold. The model is left out (a null runner, one token
each), so that hours of prefill do not hide what is asked: how many prompt tokens are found. Blocks
are real but small (one layer, one head), and they really move between device and host memory.

Three devices: one that holds everything (the infinite cache), one that holds a quarter of the KV
of the sessions that are live at once, at its peak, and that one with host memory below it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine_kit import STALL_S, submit
from benchmarks.overhead import NullRunner
from benchmarks.report import print_table, save
from benchmarks.traces import DATA
from cache_store.block import KVCacheSpec
from cache_store.eviction import make_eviction_policy
from cache_store.prefix_cache import PrefixCache
from cache_store.tiers.device import DeviceTier
from model_worker.admission import EngineLimits
from model_worker.coalescer import Coalescer
from model_worker.engine import Engine
from model_worker.grammar import no_grammars
from model_worker.grammar_desk import GrammarDesk
from model_worker.loader import resolve_model
from model_worker.lower_tiers import build_lower_tiers
from model_worker.pacer import PrefillPacer
from model_worker.scheduler import Scheduler
from model_worker.score_room import ScoreRoom
from model_worker.worker_config import WorkerConfig

BLOCK_SIZE = 32
SPEC = KVCacheSpec(BLOCK_SIZE, 1, 1, 8, "float32", 4)
MAX_MODEL_LEN = 16_384
FILE = "replay_tau_airline_sessions.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    session: int
    prompt: np.ndarray  # int32


def load_arrivals(path: Path, limit: int | None) -> list[Arrival]:
    """All requests of the file in the order of their times."""
    tokenizer = _demo_tokenizer()
    arrivals: list[Arrival] = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if limit is not None and number >= limit:
                break
            session = json.loads(line)
            for at_s, count in session["requests"]:
                text = tokenizer.apply_chat_template(
                    [_plain(message) for message in session["messages"][:count]],
                    tokenize=False,
                    add_generation_prompt=True,
                )
                ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
                arrivals.append(Arrival(float(at_s), number, np.asarray(ids, dtype=np.int32)))
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _demo_tokenizer() -> Any:
    from transformers import AutoTokenizer

    source = resolve_model("demo", None, lambda line: None)
    return AutoTokenizer.from_pretrained(source.folder)


def _plain(message: dict[str, Any]) -> dict[str, str]:
    """Role and text: calls are written out, since the demo's template has no place for them."""
    text = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        text += json.dumps(call["function"], sort_keys=True)
    return {"role": message["role"], "content": text}


def peak_live_tokens(arrivals: list[Arrival]) -> int:
    """The most KV, in tokens, of the sessions that have begun and not ended at some moment.

    What all of them begin with counts once.
    """
    first = arrivals[0].prompt
    shared = min(_num_common(first, arrival.prompt) for arrival in arrivals)
    last = {arrival.session: number for number, arrival in enumerate(arrivals)}
    sizes: dict[int, int] = {}
    peak = 0
    for number, arrival in enumerate(arrivals):
        sizes[arrival.session] = len(arrival.prompt) - shared
        peak = max(peak, shared + sum(sizes.values()))
        if last[arrival.session] == number:
            del sizes[arrival.session]
    return peak


def _num_common(left: np.ndarray, right: np.ndarray) -> int:
    size = min(len(left), len(right))
    unequal = left[:size] != right[:size]
    return int(unequal.argmax()) if unequal.any() else size


def replay(
    arrivals: list[Arrival], num_blocks: int, num_host_blocks: int, speed_up: float
) -> dict[str, Any]:
    device = DeviceTier(SPEC, num_blocks, torch.device("cpu"))
    pacer = PrefillPacer(2.0, 8192)
    config = WorkerConfig(
        endpoint="", worker_id="replay", host_cache_size=num_host_blocks * SPEC.bytes_per_block
    )
    # Without a model there is no prefill rate to measure: every hit is loaded.
    tiers = build_lower_tiers(config, device, "replay", lambda: None, lambda: None, print)
    cache = PrefixCache(
        num_blocks,
        BLOCK_SIZE,
        make_eviction_policy("lru"),
        None if tiers is None else tiers.lower,
        clock_ns=time.time_ns,
    )
    scheduler = Scheduler(
        cache,
        pacer,
        block_size=BLOCK_SIZE,
        max_num_seqs=64,
        eos_token_ids=(),
        coalescer=Coalescer(BLOCK_SIZE),
        score_room=ScoreRoom(10**6),
    )
    limits = EngineLimits("replay", BLOCK_SIZE, MAX_MODEL_LEN, 10**6, 10**6)
    engine = Engine(
        scheduler, NullRunner(), cache, pacer, limits, time.monotonic, GrammarDesk(no_grammars)
    )
    result = _drive(engine, arrivals, speed_up)
    result["evicted_blocks"] = cache.stats().evicted_total
    for tier in cache.stats().tiers:
        result[f"promoted_from_{tier.tier}"] = tier.promoted_total
        result[f"stored_in_{tier.tier}"] = tier.stored_total
    engine.check_integrity()
    if tiers is not None:
        tiers.threads.close()
    return result


def _drive(engine: Engine, arrivals: list[Arrival], speed_up: float) -> dict[str, Any]:
    started = time.monotonic()
    num_next = num_cached = num_host = 0
    while num_next < len(arrivals) or engine.has_work:
        now_s = (time.monotonic() - started) * speed_up
        while num_next < len(arrivals) and arrivals[num_next].at_s <= now_s:
            submit(engine, str(num_next), arrivals[num_next].prompt, 1)
            num_next += 1
        if not engine.has_work:
            engine.advance_transfers()
            time.sleep(STALL_S)
            continue
        engine.step()
        if engine.is_stalled:
            time.sleep(STALL_S)
        for outputs in engine.take_outputs().values():
            for output in outputs:
                num_cached += output.num_cached_tokens or 0
                num_host += output.num_host_tokens
                assert output.error is None, output.error
    num_tokens = sum(len(arrival.prompt) for arrival in arrivals)
    return {
        "token_hit_rate": round(num_cached / num_tokens, 4),
        "from_host": round(num_host / num_tokens, 4),
        "prompt_tokens": num_tokens,
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--speed-up", type=float, default=100.0)
    parser.add_argument("--path", type=Path, default=DATA / FILE)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    arrivals = load_arrivals(arguments.path, arguments.limit)
    everything = 2 * sum(len(a.prompt) for a in arrivals) // BLOCK_SIZE // 4
    infinite = replay(arrivals, everything, 0, arguments.speed_up)
    live_tokens = peak_live_tokens(arrivals)
    longest = max(len(arrival.prompt) for arrival in arrivals)
    quarter = max(live_tokens // BLOCK_SIZE // 4, longest // BLOCK_SIZE + 2)
    results: dict[str, Any] = {
        "live_kv_tokens": live_tokens,
        "device_tokens": quarter * BLOCK_SIZE,
        "infinite": infinite,
        "quarter": replay(arrivals, quarter, 0, arguments.speed_up),
        "quarter_and_host": replay(arrivals, quarter, 2 * everything, arguments.speed_up),
    }
    best = infinite["token_hit_rate"]
    rows = []
    for name in ("infinite", "quarter", "quarter_and_host"):
        rate = results[name]["token_hit_rate"]
        results[name]["share_of_infinite"] = round(rate / best, 4)
        rows.append((name, rate, results[name]["share_of_infinite"], results[name]["seconds"]))
    print_table(rows, ("device", "token hit rate", "of infinite", "s"))
    workload = (
        f"{len(arrivals)} requests of tau-bench airline chats, think times / "
        f"{arguments.speed_up:g}, device for a quarter of the live KV"
    )
    save("session_replay", workload, results, arguments.output)


if __name__ == "__main__":
    main()
