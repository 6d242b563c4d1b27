"""Ten minutes of churn through all tiers: do memory, disk and descriptors stay within their limits?

    python -m benchmarks.churn [--minutes M] [--output FILE]

Random conversations come, grow, fork and are dropped, faster than any tier can hold them, so that
blocks move between device, host memory and disk all the time. The model is left out; in its place
a runner fills the rows that a step would have computed, so that memory is touched as in life. What
is watched: the process's resident memory beyond what it took with empty tiers, the bytes of the
disk tier's folder, open descriptors, and threads.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine_kit import STALL_S, submit
from benchmarks.report import print_table, save
from cache_store.block import KVCacheSpec
from cache_store.eviction import make_eviction_policy
from cache_store.prefix_cache import PrefixCache
from cache_store.tiers.device import DeviceTier
from model_worker.admission import EngineLimits
from model_worker.batch import ScheduledBatch, StepResult
from model_worker.coalescer import Coalescer
from model_worker.engine import Engine
from model_worker.grammar import no_grammars
from model_worker.grammar_desk import GrammarDesk
from model_worker.lower_tiers import build_lower_tiers
from model_worker.model_runner import CompletedStep, PendingStep
from model_worker.pacer import PrefillPacer
from model_worker.protocol import PrefixAction, PrefixCommand
from model_worker.scheduler import Scheduler
from model_worker.score_room import ScoreRoom
from model_worker.worker_config import WorkerConfig

BLOCK_SIZE = 32
SPEC = KVCacheSpec(BLOCK_SIZE, 30, 3, 64, "float32", 4)  # of the demo model
DEVICE_BLOCKS = 128
HOST_BYTES = 512 * 2**20
DISK_BYTES = 1024 * 2**20
MAX_MODEL_LEN = 2048
VOCAB = 1000
SAMPLE_S = 5.0
# What a process takes for this and that beside the tiers; the 5 % are of the caps.
TOLERANCE = 0.05


class FillingRunner:
    """Writes something into every row of the step, and answers with the same token."""

    def __init__(self, tier: DeviceTier) -> None:
        self._tier = tier

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        self._tier.copy_rows(batch.copies)
        for item in batch.scheduled:
            lease, start = item.request.lease, item.start
            assert lease is not None
            last = start + item.num_scheduled_tokens - 1
            for index in range(start // BLOCK_SIZE, last // BLOCK_SIZE + 1):
                block_id = lease.block_ids[index]
                first_row = max(0, start - index * BLOCK_SIZE)
                for tensor in (self._tier.keys, self._tier.values):
                    tensor[:, block_id, first_row:] = float(index)
        tokens = tuple((7,) if item.reaches_end else () for item in batch.scheduled)
        return CompletedStep(StepResult(tokens))


class Churn:
    """Conversations that begin, go on, fork and are forgotten at random."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._ids = np.random.default_rng(seed)
        self._system = self._new(96)
        self._chats: list[np.ndarray] = []
        self.num_requests = 0

    def act(self) -> None:
        chats, chance = self._chats, self._random.random()
        if not chats or chance < 0.3:
            chats.append(np.concatenate((self._system, self._new(self._random.randrange(200)))))
        elif chance < 0.4:
            chat = self._random.choice(chats)
            chats.append(np.concatenate((chat[: len(chat) // 2], self._new(50))))
        elif chance < 0.45:
            chat = chats.pop(self._random.randrange(len(chats)))
            self._command(PrefixAction.DROP, chat)
            return
        elif chance < 0.55:
            self._command(PrefixAction.DEMOTE, self._random.choice(chats))
            return
        index = self._random.randrange(len(chats))
        grown = np.concatenate((chats[index], self._new(self._random.randrange(1, 120))))
        chats[index] = grown
        if len(grown) > MAX_MODEL_LEN - 64 or len(chats) > 400:
            chats.pop(index)
        if len(grown) < MAX_MODEL_LEN - 64:
            self.num_requests += 1
            submit(self._engine, str(self.num_requests), grown, self._random.randrange(1, 20))

    def _new(self, count: int) -> np.ndarray:
        return self._ids.integers(1, VOCAB, count, dtype=np.int32)

    def _command(self, action: PrefixAction, chat: np.ndarray) -> None:
        encoded = chat.astype("<i4").tobytes()
        self._engine.act_on_prefix(
            PrefixCommand(call_id="", action=action, prompt_token_ids=encoded)
        )


def build_engine(folder: str) -> tuple[Engine, PrefixCache, Any]:
    device = DeviceTier(SPEC, DEVICE_BLOCKS, torch.device("cpu"))
    device.keys.zero_()
    device.values.zero_()  # touched, so that the baseline holds the device's memory
    config = WorkerConfig(
        endpoint="",
        worker_id="churn",
        host_cache_size=HOST_BYTES,
        disk_cache_dir=folder,
        disk_cache_size=DISK_BYTES,
    )
    tiers = build_lower_tiers(config, device, "churn", lambda: None, lambda: None, print)
    assert tiers is not None
    policy = make_eviction_policy("lru")
    cache = PrefixCache(
        DEVICE_BLOCKS, BLOCK_SIZE, policy, tiers.lower, clock_ns=time.time_ns, has_events=True
    )
    pacer = PrefillPacer(2.0, 512)
    scheduler = Scheduler(
        cache,
        pacer,
        block_size=BLOCK_SIZE,
        max_num_seqs=16,
        eos_token_ids=(),
        coalescer=Coalescer(BLOCK_SIZE),
        score_room=ScoreRoom(VOCAB),
    )
    limits = EngineLimits("churn", BLOCK_SIZE, MAX_MODEL_LEN, VOCAB, 10**6)
    engine = Engine(
        scheduler,
        FillingRunner(device),
        cache,
        pacer,
        limits,
        time.monotonic,
        GrammarDesk(no_grammars),
    )
    return engine, cache, tiers


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def folder_bytes(folder: str) -> int:
    total = 0
    for file in Path(folder).rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue  # erased while we look
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headstart-churn-") as folder:
        engine, cache, tiers = build_engine(folder)
        churn = Churn(engine, seed=1)
        baseline = resident_bytes()
        samples: list[dict[str, Any]] = []
        started = time.monotonic()
        until, next_sample = started + arguments.minutes * 60, started
        while (now := time.monotonic()) < until:
            if now >= next_sample:
                samples.append(sample(started, baseline, folder))
                next_sample = now + SAMPLE_S
            if engine.stats().num_waiting < 8:
                churn.act()
            engine.step()
            if engine.is_stalled or not engine.has_work:
                time.sleep(STALL_S)
            engine.take_outputs()
            engine.take_events()
        while engine.has_work:
            engine.step()
        engine.check_integrity()
        stats = cache.stats()
        tiers.threads.close()
        samples.append(sample(started, baseline, folder))
    report(samples, stats, churn.num_requests, arguments)


def sample(started: float, baseline: int, folder: str) -> dict[str, Any]:
    return {
        "at_s": round(time.monotonic() - started, 1),
        "resident_mib": round((resident_bytes() - baseline) / 2**20, 1),
        "disk_mib": round(folder_bytes(folder) / 2**20, 1),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def report(
    samples: list[dict[str, Any]], stats: Any, num_requests: int, arguments: argparse.Namespace
) -> None:
    settled = samples[len(samples) // 3 : -1] or samples
    results = {
        "host_cap_mib": HOST_BYTES / 2**20,
        "disk_cap_mib": DISK_BYTES / 2**20,
        "max_resident_mib_over_baseline": max(each["resident_mib"] for each in samples),
        "max_disk_mib": max(each["disk_mib"] for each in samples),
        "descriptors_first_last": [settled[0]["descriptors"], settled[-1]["descriptors"]],
        "max_descriptors": max(each["descriptors"] for each in samples),
        "threads_first_last": [settled[0]["threads"], settled[-1]["threads"]],
        "requests": num_requests,
        "tiers": {
            each.tier.value: {
                "promoted": each.promoted_total,
                "stored": each.stored_total,
                "dropped": each.dropped_total,
                "failed": each.failed_total,
            }
            for each in stats.tiers
        },
        "samples": samples[:: max(1, len(samples) // 40)],
    }
    limit = HOST_BYTES / 2**20 * (1 + TOLERANCE)
    rows = [
        ("resident over baseline, MiB", results["max_resident_mib_over_baseline"], f"<= {limit}"),
        ("disk, MiB", results["max_disk_mib"], f"<= {results['disk_cap_mib']}"),
        ("descriptors", results["descriptors_first_last"], "no growth"),
        ("threads", results["threads_first_last"], "no growth"),
    ]
    print_table(rows, ("what", "measured", "goal"))
    print(results["tiers"], num_requests, "requests")
    save("churn", f"{arguments.minutes:g} minutes", results, arguments.output, seed=1)


if __name__ == "__main__":
    main()
