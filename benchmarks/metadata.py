"""Speed and memory of the metadata store in Redis and in Valkey: no model, no HTTP.

    python -m benchmarks.metadata [--output FILE] [--num-chunks N]

Each server is started on loopback, and holds three workers with as many chunks each. What is
located is a prompt of 100,000 tokens (391 chunks) that one worker holds whole, one to its half and
one not at all; a call is one round trip. Bytes are MEMORY USAGE of a worker's hash over its chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.report import print_table, save
from cache_store.block_hash import HASH_BYTES
from cache_store.events import EVENT_CHUNK_TOKENS, BlockStored, CacheEvent, Tier
from cache_store.metadata.base import MetadataStore, SessionRecord, WorkerRecord
from cache_store.metadata.memory import MemoryMetadataStore
from cache_store.metadata.redis import RedisMetadataStore
from cache_store.metadata.redis_link import RedisLink
from tests.redis_kit import Server, running_server

PROMPT_TOKENS = 100_000
NUM_WORKERS = 3
LEASE_S = 600.0
EVENTS_PER_CALL = 2_048
HISTORY_BYTES = 4 * 20_000  # 20,000 tokens
BLOCK_SIZE = 32
GOAL_LOCATE_S = 0.005
FINGERPRINT = "benchmark"


def make_worker(number: int) -> WorkerRecord:
    return WorkerRecord(
        worker_id=f"worker-{number}",
        epoch=time.time_ns(),
        endpoint="tcp://127.0.0.1:7000",
        fingerprint=FINGERPRINT,
    )


async def tell(store: MetadataStore, worker: WorkerRecord, hashes: bytes) -> None:
    size = EVENTS_PER_CALL * HASH_BYTES
    for start in range(0, len(hashes), size):
        events: list[CacheEvent] = [BlockStored(Tier.DEVICE, hashes[start : start + size])]
        await store.apply_events(worker, events, LEASE_S)


async def fill(store: MetadataStore, num_chunks: int) -> tuple[bytes, float]:
    """The hashes of the prompt, and the seconds that all events took."""
    num_asked = -(-PROMPT_TOKENS // EVENT_CHUNK_TOKENS)
    prompt = secrets.token_bytes(num_asked * HASH_BYTES)
    began = time.perf_counter()
    for number in range(NUM_WORKERS):
        worker = make_worker(number)
        await store.renew_worker(worker, LEASE_S)
        num_held = (num_asked, num_asked // 2, 0)[number]
        others = secrets.token_bytes((num_chunks - num_held) * HASH_BYTES)
        await tell(store, worker, prompt[: num_held * HASH_BYTES] + others)
    return prompt, time.perf_counter() - began


async def seconds_of(call: Callable[[], Awaitable[Any]], repetitions: int) -> dict[str, float]:
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        await call()
        times.append(time.perf_counter() - began)
    times.sort()
    return {
        "median_s": statistics.median(times),
        "p99_s": times[int(0.99 * (len(times) - 1))],
        "max_s": times[-1],
    }


async def measure(
    store: MetadataStore, server: Server | None, num_chunks: int, repetitions: int
) -> dict[str, Any]:
    await store.start()
    assert not store.is_degraded
    prompt, fill_s = await fill(store, num_chunks)
    located = await store.locate(FINGERPRINT, prompt)
    num_asked = len(prompt) // HASH_BYTES
    assert [len(found.tiers) for found in located] == [num_asked, num_asked // 2]
    results: dict[str, Any] = {
        "num_workers": NUM_WORKERS,
        "num_chunks_per_worker": num_chunks,
        "num_chunks_asked": num_asked,
        "events_chunks_per_s": NUM_WORKERS * num_chunks / fill_s,
        "locate": await seconds_of(lambda: store.locate(FINGERPRINT, prompt), repetitions),
        "session": await measure_sessions(store, repetitions),
    }
    if server is not None:
        with server.client() as client:
            keys = client.keys(f"headstart:1:chunks:{FINGERPRINT}:*")
            assert isinstance(keys, list)
            num_bytes = [int(str(client.memory_usage(key, samples=0))) for key in keys]
            results["server_version"] = str(client.info("server")["redis_version"])
        per_chunk = sum(num_bytes) / (NUM_WORKERS * num_chunks)
        results["bytes_per_chunk"] = per_chunk
        results["bytes_per_block_of_32"] = per_chunk * BLOCK_SIZE / EVENT_CHUNK_TOKENS
    await store.close()
    return results


async def measure_sessions(store: MetadataStore, repetitions: int) -> dict[str, Any]:
    """A turn's get and put of a session whose history holds 20,000 token ids."""
    history = secrets.token_bytes(HISTORY_BYTES)
    version = 0

    async def put() -> None:
        nonlocal version
        now = time.time()
        record = SessionRecord(
            tenant="t",
            session_id="s",
            version=version,
            created_at=now,
            last_active_at=now,
            expires_at=now + LEASE_S,
            history=history,
        )
        assert await store.put_session(record, version)
        version += 1

    return {
        "history_bytes": HISTORY_BYTES,
        "put": await seconds_of(put, repetitions),
        "get": await seconds_of(lambda: store.get_session("t", "s"), repetitions),
    }


def run(num_chunks: int, repetitions: int) -> dict[str, Any]:
    results = {}
    for kind in ("redis", "valkey"):
        with tempfile.TemporaryDirectory() as folder, running_server(kind, Path(folder)) as server:
            store = RedisMetadataStore(RedisLink(server.url, timeout_s=5.0))
            results[kind] = asyncio.run(measure(store, server, num_chunks, repetitions))
    results["memory"] = asyncio.run(measure(MemoryMetadataStore(), None, num_chunks, repetitions))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file (default: results/metadata.json)")
    parser.add_argument("--num-chunks", type=int, default=200_000, help="chunks of each worker")
    parser.add_argument("--repetitions", type=int, default=300)
    arguments = parser.parse_args()
    results = run(arguments.num_chunks, arguments.repetitions)
    rows = [
        (
            name,
            f"{result['locate']['median_s'] * 1000:.2f}",
            f"{result['locate']['p99_s'] * 1000:.2f}",
            f"{result['events_chunks_per_s']:,.0f}",
            f"{result.get('bytes_per_chunk', 0.0):.1f}",
            f"{result.get('bytes_per_block_of_32', 0.0):.1f}",
            f"{result['session']['get']['median_s'] * 1000:.2f}",
            f"{result['session']['put']['median_s'] * 1000:.2f}",
        )
        for name, result in results.items()
    ]
    print_table(
        rows,
        ("store", "locate ms", "p99 ms", "chunks/s", "B/chunk", "B/block", "get ms", "put ms"),
    )
    workload = (
        f"{NUM_WORKERS} workers x {arguments.num_chunks} chunks; a prompt of {PROMPT_TOKENS} tokens"
    )
    goals = {"locate_median_s": GOAL_LOCATE_S}
    save("metadata", workload, {"goals": goals, "stores": results}, arguments.output)


if __name__ == "__main__":
    main()
