"""WorkerRegistry: which workers serve, which are refused, and what is said about it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from cache_store.events import AllBlocksCleared, BlockRemoved
from model_worker.protocol import ModelCard, TenantPolicy
from service.workers.base import StateChange, WorkerNotReadyError, WorkerState
from service.workers.cache_news import CacheNews
from service.workers.fake import FakeWorker
from service.workers.registry import (
    RegistryHealth,
    WorkerRegistry,
    WorkerReport,
    card_differences,
)
from tests.scripted_worker import make_card
from tests.worker_rigs import counting_script


def make_worker(worker_id: str, card: ModelCard | None = None) -> FakeWorker:
    return FakeWorker(card or make_card(), counting_script, worker_id=worker_id)


def other_card(**changes: object) -> ModelCard:
    return msgspec.structs.replace(make_card(), **changes)


@contextlib.asynccontextmanager
async def started(*workers: FakeWorker) -> AsyncIterator[WorkerRegistry]:
    registry = WorkerRegistry(workers)
    await registry.start()
    try:
        yield registry
    finally:
        await registry.close()


def test_without_workers_it_is_not_ready_and_says_why() -> None:
    assert WorkerRegistry(()).health() == RegistryHealth(False, "no worker is known")


def test_two_workers_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two workers are named 'a'"):
        WorkerRegistry([make_worker("a"), make_worker("a")])


async def test_ready_workers_serve_the_model_of_the_first() -> None:
    workers = [make_worker("a"), make_worker("b")]
    async with started(*workers) as registry:
        assert await registry.wait_ready(1) == make_card()
        assert registry.card == make_card()
        assert registry.ready_workers() == tuple(workers)
        assert registry.workers == tuple(workers)
        assert registry.get("b") is workers[1]
        assert registry.get("c") is None
        assert registry.health() == RegistryHealth(ready=True, reason="")
    assert registry.ready_workers() == ()
    assert [worker.state for worker in workers] == [WorkerState.LOST] * 2


async def test_one_ready_worker_is_enough() -> None:
    lost = make_worker("a")
    async with started(lost, make_worker("b")) as registry:
        lost.set_lost("the connection was closed")
        assert registry.health().ready
        assert [worker.worker_id for worker in registry.ready_workers()] == ["b"]
        assert registry.reports() == (
            WorkerReport("a", WorkerState.LOST, "the connection was closed"),
            WorkerReport("b", WorkerState.READY, ""),
        )


async def test_the_reason_names_each_worker() -> None:
    first, second = make_worker("a"), make_worker("b")
    async with started(first, second) as registry:
        first.set_loading("weights 40 %")
        second.set_failed("model 'x': no such file")
        assert registry.health() == RegistryHealth(
            False,
            "worker a is loading: weights 40 %; worker b is failed: model 'x': no such file",
        )
        with pytest.raises(WorkerNotReadyError, match="worker a is loading: weights 40 %"):
            await registry.wait_ready(0.01)


async def test_waiting_ends_at_once_when_all_have_failed() -> None:
    only = make_worker("a")
    only.set_failed("no such file")
    async with started(only) as registry:
        with pytest.raises(WorkerNotReadyError, match="worker a is failed: no such file"):
            await registry.wait_ready(60)


@pytest.mark.parametrize(
    ("card", "difference"),
    [
        (other_card(fingerprint="0" * 32), f"fingerprint is {'0' * 32}, not {'f' * 32}"),
        (other_card(block_size=32), "block_size is 32, not 16"),
        (other_card(hash_version="2"), "hash_version is 2, not 1"),
        (other_card(tokenizer_files=()), "tokenizer file tokenizer.json differs"),
    ],
    ids=["fingerprint", "block_size", "hash_version", "tokenizer"],
)
async def test_a_worker_of_another_model_is_refused_by_name(
    card: ModelCard, difference: str
) -> None:
    changes: list[StateChange] = []
    odd = make_worker("odd", card)
    odd.set_loading()
    registry = WorkerRegistry([make_worker("a"), odd])
    registry.add_state_listener(changes.append)
    await registry.start()
    try:
        odd.set_ready()
        refusal = f"refused, it does not serve the model of this gateway: {difference}"
        assert registry.reports()[1] == WorkerReport("odd", WorkerState.FAILED, refusal)
        assert changes[-1] == StateChange("odd", WorkerState.FAILED, refusal)
        assert [worker.worker_id for worker in registry.ready_workers()] == ["a"]
        assert registry.card == make_card()
    finally:
        await registry.close()


async def test_the_adopted_model_outlives_its_workers() -> None:
    first, odd = make_worker("a"), make_worker("odd", other_card(block_size=32))
    odd.set_loading()
    async with started(first, odd) as registry:
        first.set_lost("gone")
        odd.set_ready()
        assert registry.health().reason == (
            "worker a is lost: gone; worker odd is failed: refused, it does not serve the model "
            "of this gateway: block_size is 32, not 16"
        )


async def test_capacity_may_differ_between_workers() -> None:
    larger = make_worker("b", other_card(num_blocks=9999, device="cuda"))
    async with started(make_worker("a"), larger) as registry:
        assert len(registry.ready_workers()) == 2


async def test_a_refused_worker_that_returns_with_the_right_model_serves() -> None:
    cards = [other_card(block_size=32), make_card()]

    class Replaced(FakeWorker):
        @property
        def card(self) -> ModelCard | None:
            return cards[0] if self.state is WorkerState.READY else None

    odd = Replaced(make_card(), counting_script, worker_id="odd")
    odd.set_loading()
    async with started(make_worker("a"), odd) as registry:
        odd.set_ready()
        assert len(registry.ready_workers()) == 1
        odd.set_lost()
        cards.pop(0)
        odd.set_ready()
        assert len(registry.ready_workers()) == 2


def test_all_differences_are_named() -> None:
    theirs = other_card(block_size=32, hash_version="2")
    assert card_differences(make_card(), theirs) == (
        "block_size is 32, not 16",
        "hash_version is 2, not 1",
    )
    assert card_differences(make_card(), other_card(max_model_len=1)) == ()


async def test_a_worker_added_while_running_serves_and_is_watched() -> None:
    async with started() as registry:
        changes: list[StateChange] = []
        registry.add_state_listener(changes.append)
        worker = make_worker("a")
        await registry.add(worker)
        assert await registry.wait_ready(1) == make_card()
        assert registry.ready_workers() == (worker,)
        assert changes == [StateChange("a", WorkerState.READY, "")]
        with pytest.raises(ValueError, match="two workers are named 'a'"):
            await registry.add(make_worker("a"))
        stranger = make_worker("b", other_card(fingerprint="else"))
        await registry.add(stranger)
        assert registry.ready_workers() == (worker,)
        assert registry.reports()[1].state is WorkerState.FAILED


async def test_a_worker_that_was_removed_is_closed_and_forgotten() -> None:
    async with started(make_worker("a")) as registry:
        stranger = make_worker("b", other_card(fingerprint="else"))
        await registry.add(stranger)
        changes: list[StateChange] = []
        registry.add_state_listener(changes.append)
        await registry.remove("b")
        await registry.remove("never known")
        assert stranger.state is WorkerState.LOST
        assert [worker.worker_id for worker in registry.workers] == ["a"]
        again = make_worker("b")
        await registry.add(again)
        stranger.set_failed("too late to matter")
        assert registry.ready_workers() == registry.workers
        assert changes == [StateChange("b", WorkerState.READY, "")]


async def test_policies_of_tenants_are_told_to_all_workers_also_to_later_ones() -> None:
    first, second = make_worker("a"), make_worker("b")
    async with started(first) as registry:
        assert first.tenant_policies == ()
        registry.set_tenant_policies([TenantPolicy(tenant="t", weight=3.0)])
        await registry.add(second)
    assert (
        first.tenant_policies == second.tenant_policies == (TenantPolicy(tenant="t", weight=3.0),)
    )


async def test_cache_news_of_all_workers_are_heard_also_of_later_ones() -> None:
    news: list[CacheNews] = []
    first, second = make_worker("a"), make_worker("b")
    async with started(first) as registry:
        registry.add_event_listener(news.append)
        await registry.add(second)
        first.tell(BlockRemoved(b""))
    cleared, removed = (AllBlocksCleared(),), (BlockRemoved(b""),)
    assert news == [CacheNews("b", 1, cleared), CacheNews("a", 1, removed)]
