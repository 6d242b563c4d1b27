"""Servers of one shape, up together and measured in turn: A B C A B C.

Owns the order and who is awake. A server that fails is named with the reason and left out of what
follows; the others go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Any

import httpx
import psutil

from benchmarks.peers.peer import Peer, RunningPeer
from benchmarks.peers.record import Samples, extend
from benchmarks.peers.settings import ServerShape
from benchmarks.peers.workloads import Workload, warm_up

MIN_FREE_BYTES = 2 * 2**30  # left for a next server, or it is not started


class Round:
    """``with Round(peers, shape) as round_: samples = round_.measure(workload, 3, seed=0)``."""

    def __init__(self, peers: Sequence[Peer], shape: ServerShape) -> None:
        self._peers = peers
        self._shape = shape
        self._running: list[RunningPeer] = []
        self._all: list[RunningPeer] = []
        self.failed: dict[str, str] = {}

    def __enter__(self) -> Round:
        try:
            for peer in self._peers:
                self._bring_up(peer)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def measure(
        self, workload: Workload, num_runs: int, seed: int, names: Collection[str]
    ) -> dict[str, Samples]:
        """By peer of ``names``: the samples of ``num_runs`` turns each, in turn."""
        samples: dict[str, Samples] = {}
        for run in range(num_runs):
            for running in [one for one in self._running if one.peer.name in names]:
                name = running.peer.name
                started = time.monotonic()
                turn = self._turn(running, workload, 1_000_000 * seed + run)
                if turn is None:
                    samples.pop(name, None)  # half of the runs are no figure
                    continue
                extend(samples.setdefault(name, {}), turn)
                print(f"{workload.name} {run + 1}/{num_runs} {name}: "
                      f"{time.monotonic() - started:.1f} s", flush=True)  # fmt: skip
        return samples

    def describe(self) -> dict[str, dict[str, Any]]:
        """By peer: what ran, for the record."""
        return {
            running.peer.name: {
                "title": running.peer.title,
                "version": running.peer.version,
                "weight_format": running.peer.weight_format,
                "note": running.peer.note,
                "command": running.shown_command(),
                "start_s": round(running.process.start_s or 0.0, 1),
                "idle_share": round(running.process.idle_share or 0.0, 3),
                "resident_bytes": running.process.resident_bytes(),
            }
            for running in self._running
        }

    def _bring_up(self, peer: Peer) -> None:
        if psutil.virtual_memory().available < MIN_FREE_BYTES:
            self.failed[peer.name] = "not enough memory beside the others"
            return
        running = RunningPeer(peer, self._shape)
        self._all.append(running)
        try:
            running.process.start()
            asyncio.run(self._with_client(running, None, 0))
            running.process.rest()
        except (RuntimeError, httpx.HTTPError) as error:
            self._give_up(running, error)
            return
        self._running.append(running)
        print(f"ready: {peer.name} {peer.version}, {running.process.start_s:.0f} s", flush=True)

    def _turn(self, running: RunningPeer, workload: Workload, seed: int) -> Samples | None:
        running.process.wake()
        try:
            samples = asyncio.run(self._with_client(running, workload, seed))
        except (RuntimeError, httpx.HTTPError) as error:
            self._running.remove(running)
            self._give_up(running, error)
            return None
        running.process.rest()
        return samples

    @staticmethod
    async def _with_client(
        running: RunningPeer, workload: Workload | None, seed: int
    ) -> dict[str, list[float]]:
        async with running.client() as client:
            if workload is None:
                await warm_up(client)
                return {}
            return await workload.turn(client, seed)

    def _give_up(self, running: RunningPeer, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        print(f"failed: {running.peer.name}: {reason}", flush=True)
        self.failed[running.peer.name] = reason[:300]
        running.process.stop()

    def _stop(self) -> None:
        for running in self._all:
            running.process.stop()
