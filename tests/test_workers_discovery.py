"""Workers that announce themselves: found, replaced, let go, and kept while nobody can tell."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from cache_store.metadata.base import MetadataError, WorkerRecord
from cache_store.metadata.memory import MemoryMetadataStore
from service.workers.base import Worker
from service.workers.discovery import WorkerDiscovery
from service.workers.fake import FakeWorker
from service.workers.registry import WorkerRegistry
from tests.scripted_worker import make_card
from tests.worker_rigs import counting_script


class Store(MemoryMetadataStore):
    """With a clock to be set, and out of reach when told."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.is_gone = False
        super().__init__(clock=lambda: self.now)

    async def all_workers(self) -> Sequence[WorkerRecord]:
        if self.is_gone:
            raise MetadataError("gone")
        return await super().all_workers()


class Bench:
    def __init__(self) -> None:
        self.store = Store()
        self.static = FakeWorker(make_card(), counting_script, worker_id="static")
        self.registry = WorkerRegistry([self.static])
        self.made: list[FakeWorker] = []
        self.discovery = WorkerDiscovery(self.store, self.registry, self.make)

    def make(self, record: WorkerRecord) -> Worker:
        if record.endpoint == "tcp://nowhere:1":
            raise ValueError("a tcp:// link needs a secret")
        worker = FakeWorker(make_card(), counting_script, worker_id=record.worker_id)
        self.made.append(worker)
        return worker

    async def announce(self, worker_id: str, endpoint: str, epoch: int = 1) -> None:
        record = WorkerRecord(
            worker_id=worker_id, epoch=epoch, endpoint=endpoint, fingerprint="any"
        )
        await self.store.renew_worker(record, 15.0)

    async def ids(self) -> list[str]:
        await self.discovery.look()
        return [worker.worker_id for worker in self.registry.ready_workers()]


@pytest.fixture
async def bench() -> Bench:
    made = Bench()
    await made.registry.start()
    return made


async def test_workers_are_found_and_let_go_when_their_lease_and_their_link_end(
    bench: Bench,
) -> None:
    assert await bench.ids() == ["static"]
    await bench.announce("a", "tcp://host:1")
    await bench.announce("b", "tcp://host:2")
    assert await bench.ids() == ["static", "a", "b"]
    assert await bench.ids() == ["static", "a", "b"]
    assert len(bench.made) == 2
    assert bench.discovery.announces_itself("a")
    assert not bench.discovery.announces_itself("static")
    bench.store.now += 20.0
    assert await bench.ids() == ["static", "a", "b"]  # the links are up
    bench.made[0].set_lost("the connection was closed")
    assert await bench.ids() == ["static", "b"]
    assert bench.registry.get("a") is None
    bench.static.set_lost("the connection was closed")
    assert bench.registry.get("static") is not None
    await bench.registry.close()


async def test_a_store_out_of_reach_changes_nothing(bench: Bench) -> None:
    await bench.announce("a", "tcp://host:1")
    assert await bench.ids() == ["static", "a"]
    bench.store.is_gone = True
    bench.store.now += 20.0
    bench.made[0].set_lost("the connection was closed")
    await bench.discovery.look()
    assert bench.registry.get("a") is not None
    await bench.registry.close()


async def test_a_worker_started_again_under_another_name_replaces_the_first(bench: Bench) -> None:
    await bench.announce("a", "tcp://host:1")
    assert await bench.ids() == ["static", "a"]
    bench.store.now += 20.0
    await bench.announce("b", "tcp://host:1")
    assert await bench.ids() == ["static", "b"]
    await bench.registry.close()


async def test_a_worker_that_moved_is_followed(bench: Bench) -> None:
    await bench.announce("a", "tcp://host:1")
    assert await bench.ids() == ["static", "a"]
    await bench.announce("a", "tcp://host:2")
    assert await bench.ids() == ["static", "a"]
    assert len(bench.made) == 2
    await bench.registry.close()


async def test_records_without_an_endpoint_are_other_gateways_own(bench: Bench) -> None:
    await bench.announce("tcp://host:1", "")
    assert await bench.ids() == ["static"]
    await bench.registry.close()


async def test_a_worker_that_cannot_be_connected_to_is_said_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.announce("a", "tcp://nowhere:1")
    assert await bench.ids() == ["static"]
    assert await bench.ids() == ["static"]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == ["worker a cannot be used: a tcp:// link needs a secret"]
    await bench.registry.close()
