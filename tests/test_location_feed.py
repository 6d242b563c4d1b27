"""What workers' caches tell, on its way into a store: in order, bounded, and tried again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from cache_store.events import AllBlocksCleared, CacheEvent
from cache_store.metadata.base import MetadataError, WorkerRecord
from cache_store.metadata.memory import MemoryMetadataStore
from service.location_feed import LocationFeed
from service.workers.fake import FakeWorker
from service.workers.registry import WorkerRegistry
from tests.metadata_kit import chunk, chunks, removed, stored
from tests.scripted_worker import make_card
from tests.worker_rigs import counting_script

FINGERPRINT = make_card().fingerprint


class Store(MemoryMetadataStore):
    def __init__(self) -> None:
        super().__init__()
        self.is_gone = False
        self.applied: list[CacheEvent] = []

    async def apply_events(
        self, worker: WorkerRecord, events: Sequence[CacheEvent], lease_s: float
    ) -> None:
        if self.is_gone:
            raise MetadataError("gone")
        await super().apply_events(worker, events, lease_s)
        self.applied += events


class Bench:
    def __init__(self, max_pending_bytes: int, own_lease: bool) -> None:
        self.store = Store()
        self.worker = FakeWorker(make_card(), counting_script, worker_id="w")
        self.registry = WorkerRegistry([self.worker])
        self.feed = LocationFeed(
            self.store,
            lambda: self.registry.workers,
            lambda worker_id: own_lease,
            max_pending_bytes=max_pending_bytes,
            retry_s=0.02,
        )
        self.registry.add_event_listener(self.feed.take)

    async def held(self, *numbers: int) -> int:
        found = await self.store.locate(FINGERPRINT, chunks(*numbers))
        return len(found[0].tiers) if found else 0


@asynccontextmanager
async def running(max_pending_bytes: int = 10_000, own_lease: bool = False) -> AsyncIterator[Bench]:
    bench = Bench(max_pending_bytes, own_lease)
    bench.feed.start()
    await bench.registry.start()
    try:
        yield bench
    finally:
        await bench.feed.close()
        await bench.registry.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def test_events_arrive_in_order() -> None:
    async with running() as bench:
        told: list[CacheEvent] = [stored(1, 2), removed(2), stored(2, 3), removed(3)]
        for event in told:
            bench.worker.tell(event)
        await until(lambda: len(bench.store.applied) == 5)
        assert bench.store.applied == [AllBlocksCleared(), *told]
        assert await bench.held(1, 2, 3) == 2
        (record,) = await bench.store.workers(FINGERPRINT)
        assert (record.worker_id, record.epoch, record.endpoint) == ("w", 1, "")


async def test_while_the_store_is_gone_events_wait_and_keep_their_order() -> None:
    async with running() as bench:
        bench.store.is_gone = True
        bench.worker.tell(stored(1))
        await asyncio.sleep(0.05)
        bench.worker.tell(stored(2), removed(1))
        await asyncio.sleep(0.05)
        bench.worker.tell(stored(1))
        assert await bench.held(1) == 0
        bench.store.is_gone = False
        await until(lambda: len(bench.store.applied) >= 5)
        assert bench.store.applied[-4:] == [stored(1), stored(2), removed(1), stored(1)]
        assert await bench.held(1, 2) == 2
        assert bench.feed.num_overflows == 0


async def test_too_much_to_keep_gives_up_all_that_is_known_of_the_worker() -> None:
    async with running(max_pending_bytes=1_000) as bench:
        bench.worker.tell(stored(1))
        await until(lambda: stored(1) in bench.store.applied)
        bench.store.is_gone = True
        for number in range(2, 30):
            bench.worker.tell(stored(number))
        assert bench.feed.num_overflows >= 1
        bench.store.is_gone = False
        bench.worker.tell(stored(99))
        await until(lambda: stored(99) in bench.store.applied)
        assert await bench.held(1) == 0
        assert await bench.held(99) == 1


async def test_a_new_life_of_a_worker_replaces_what_was_to_be_told_of_the_last() -> None:
    async with running() as bench:
        bench.store.is_gone = True
        bench.worker.tell(stored(1))
        bench.worker.set_lost("killed")
        bench.worker.set_ready()
        bench.worker.tell(stored(2))
        bench.store.is_gone = False
        await until(lambda: stored(2) in bench.store.applied)
        assert await bench.held(1) == 0
        assert [x.epoch for x in await bench.store.locate(FINGERPRINT, chunk(2))] == [2]


async def test_a_worker_that_announces_itself_is_not_announced_by_others() -> None:
    async with running(own_lease=True) as bench:
        bench.worker.tell(stored(1))
        await until(lambda: stored(1) in bench.store.applied)
        assert list(await bench.store.workers(FINGERPRINT)) == []


async def test_what_is_told_of_a_worker_that_was_removed_is_dropped() -> None:
    async with running() as bench:
        bench.store.is_gone = True
        bench.worker.tell(stored(1))
        await bench.registry.remove("w")
        bench.worker.tell(stored(2))
        bench.store.is_gone = False
        await asyncio.sleep(0.1)
        assert bench.store.applied == [AllBlocksCleared()]
