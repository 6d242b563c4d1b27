"""One contract for every kind of worker: in process, as a child, and over TCP."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from cache_store.events import AllBlocksCleared, CacheEvent
from model_worker.protocol import (
    ErrorCode,
    FinishReason,
    PrefixAction,
    RequestOutput,
    TenantPolicy,
)
from service.workers.base import (
    RequestStream,
    StateChange,
    Worker,
    WorkerLostError,
    WorkerNotReadyError,
    WorkerState,
)
from service.workers.cache_news import CacheNews
from tests.scripted_worker import SLOW_STEP_TOKEN, STORED_BEFORE, make_card
from tests.worker_rigs import (
    FakeRig,
    LocalRig,
    RemoteRig,
    Rig,
    collect,
    finish_reasons,
    first_token,
    make_request,
    reach,
    tokens_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDLESS = 100_000
PREFIX = np.arange(5, dtype=np.int32)


def make_rig(kind: str, directory: Path) -> Rig:
    makers: dict[str, Callable[[], Rig]] = {
        "fake": FakeRig,
        "local": LocalRig,
        "remote": lambda: RemoteRig(directory),
    }
    return makers[kind]()


async def opened(kind: str, directory: Path) -> AsyncIterator[Rig]:
    rig = make_rig(kind, directory)
    try:
        await rig.open()
        yield rig
    finally:
        await rig.close()


@pytest_asyncio.fixture(params=["fake", "local", "remote"], scope="module", loop_scope="module")
async def worker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Worker]:
    """One for all tests that leave it ready and idle."""
    async for rig in opened(request.param, tmp_path_factory.mktemp("worker")):
        yield rig.worker


@pytest_asyncio.fixture(params=["fake", "local", "remote"], loop_scope="module")
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    """One of its own, that may be killed."""
    async for rig in opened(request.param, tmp_path):
        yield rig


@pytest_asyncio.fixture(params=["local", "remote"], loop_scope="module")
async def link_rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    async for rig in opened(request.param, tmp_path):
        yield rig


def error_codes(outputs: list[RequestOutput]) -> list[ErrorCode]:
    return [output.error.code for output in outputs if output.error is not None]


async def until_idle(worker: Worker, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while worker.stats.num_running:
            await asyncio.sleep(0.01)


async def test_ready_with_the_card_of_its_model(worker: Worker) -> None:
    assert worker.state is WorkerState.READY
    assert worker.detail == ""
    assert worker.card == make_card()
    assert await worker.wait_ready(0) == make_card()


async def test_tokens_come_in_order_and_end_once(worker: Worker) -> None:
    outputs = await collect(worker.submit(make_request("r", first=9100, max_tokens=20)))
    assert tokens_of(outputs) == list(range(9100, 9120))
    assert finish_reasons(outputs) == [FinishReason.LENGTH]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert [o.num_cached_tokens for o in outputs if o.num_cached_tokens is not None] == [0]


async def test_abort_ends_the_stream_once(worker: Worker) -> None:
    stream = worker.submit(make_request("r", max_tokens=ENDLESS))
    await first_token(stream)
    worker.abort("r")
    worker.abort("r")
    outputs = await collect(stream, timeout_s=5)
    assert finish_reasons(outputs) == [FinishReason.ABORT]
    worker.abort("r")
    await until_idle(worker)
    assert worker.state is WorkerState.READY


async def test_abort_right_after_submit(worker: Worker) -> None:
    stream = worker.submit(make_request("r", max_tokens=ENDLESS))
    worker.abort("r")
    assert finish_reasons(await collect(stream, timeout_s=5)) == [FinishReason.ABORT]


async def test_abort_of_what_is_unknown_or_over_is_harmless(worker: Worker) -> None:
    worker.abort("never seen")
    outputs = await collect(worker.submit(make_request("r", max_tokens=2)))
    worker.abort("r")
    again = await collect(worker.submit(make_request("r", max_tokens=2)))
    assert finish_reasons(outputs) == finish_reasons(again) == [FinishReason.LENGTH]


async def test_many_requests_share_the_worker(worker: Worker) -> None:
    arrivals: list[int] = []

    async def consume(number: int, stream: RequestStream) -> list[int]:
        tokens: list[int] = []
        async for output in stream:
            tokens += output.token_ids
            arrivals.extend(number for _ in output.token_ids)
        return tokens

    streams = [
        worker.submit(make_request(f"r{n}", first=1000 * n, max_tokens=30)) for n in range(1, 21)
    ]
    async with asyncio.timeout(15):
        answers = await asyncio.gather(*(consume(n, s) for n, s in enumerate(streams, start=1)))
    assert answers == [list(range(1000 * n, 1000 * n + 30)) for n in range(1, 21)]
    num_switches = sum(a != b for a, b in itertools.pairwise(arrivals))
    assert num_switches > 300  # 20 streams one after another would switch 19 times


async def test_a_slow_consumer_holds_up_nobody_and_loses_nothing(worker: Worker) -> None:
    slow = worker.submit(make_request("slow", first=5000, max_tokens=200))
    quick = await collect(worker.submit(make_request("quick", max_tokens=250)))
    assert len(tokens_of(quick)) == 250
    assert slow.is_finished
    outputs = await collect(slow)
    assert tokens_of(outputs) == list(range(5000, 5200))
    assert len(outputs) <= 33
    assert finish_reasons(outputs) == [FinishReason.LENGTH]
    assert len([o for o in outputs if o.num_cached_tokens is not None]) == 1


async def test_a_consumer_that_gives_up_can_abort(worker: Worker) -> None:
    stream = worker.submit(make_request("r", max_tokens=ENDLESS))
    consumer = asyncio.create_task(collect(stream, timeout_s=30))
    await asyncio.sleep(0.1)
    assert worker.stats.num_running == 1
    consumer.cancel()
    await asyncio.wait([consumer])
    worker.abort("r")
    await until_idle(worker, timeout_s=2)


async def test_a_request_id_in_use_is_our_own_mistake(worker: Worker) -> None:
    stream = worker.submit(make_request("r", max_tokens=ENDLESS))
    with pytest.raises(ValueError, match="'r' is in use"):
        worker.submit(make_request("r"))
    worker.abort("r")
    await collect(stream)


async def test_a_killed_worker_ends_every_stream_with_a_typed_error(rig: Rig) -> None:
    streams = [rig.worker.submit(make_request(f"r{n}", max_tokens=ENDLESS)) for n in range(5)]
    for stream in streams:
        await first_token(stream)
    killed_at = time.monotonic()
    await rig.kill()
    for stream in streams:
        outputs = await collect(stream, timeout_s=5)
        assert finish_reasons(outputs) == [FinishReason.ERROR]
        assert error_codes(outputs) == [ErrorCode.WORKER_LOST]
    assert time.monotonic() - killed_at < 1.0
    assert rig.worker.state is WorkerState.LOST
    assert rig.worker.detail
    assert rig.worker.stats.num_running == 0


async def test_a_lost_worker_refuses_at_once(rig: Rig) -> None:
    await rig.kill()
    await reach(rig.worker, WorkerState.LOST)
    outputs = await collect(rig.worker.submit(make_request("r")), timeout_s=0.5)
    assert error_codes(outputs) == [ErrorCode.WORKER_LOST]
    assert finish_reasons(outputs) == [FinishReason.ERROR]
    with pytest.raises(WorkerNotReadyError):
        await rig.worker.reset_cache()
    with pytest.raises(WorkerNotReadyError):
        await rig.worker.act_on_prefix(PrefixAction.INSPECT, PREFIX)
    with pytest.raises(WorkerNotReadyError):
        await rig.worker.wait_ready(0)


async def test_a_worker_that_comes_back_serves_again(rig: Rig) -> None:
    changes: list[StateChange] = []
    rig.worker.add_state_listener(changes.append)
    before = rig.worker.submit(make_request("r", max_tokens=ENDLESS))
    await first_token(before)
    await rig.kill()
    await reach(rig.worker, WorkerState.LOST)
    await rig.revive()
    await rig.worker.wait_ready(20)
    # The same id again: nothing of the earlier life may reach it.
    outputs = await collect(rig.worker.submit(make_request("r", first=300, max_tokens=3)))
    assert tokens_of(outputs) == [300, 301, 302]
    assert error_codes(await collect(before)) == [ErrorCode.WORKER_LOST]
    states = [change.state for change in changes]
    assert states[0] is WorkerState.LOST
    assert states[-1] is WorkerState.READY
    assert {change.worker_id for change in changes} == {rig.worker.worker_id}


async def test_reset_cache_counts_the_blocks(worker: Worker) -> None:
    await collect(worker.submit(make_request("r", max_tokens=2)))
    assert await worker.reset_cache() > 0


async def test_calls_during_a_loss_end_in_a_typed_error(link_rig: Rig) -> None:
    link_rig.worker.submit(make_request("slow", first=SLOW_STEP_TOKEN))
    await asyncio.sleep(0.1)  # the engine is in its long step and answers no call
    reset = asyncio.create_task(link_rig.worker.reset_cache())
    drop = asyncio.create_task(link_rig.worker.act_on_prefix(PrefixAction.DROP, PREFIX))
    await asyncio.sleep(0.1)
    await link_rig.kill()
    for call in (reset, drop):
        with pytest.raises(WorkerLostError):
            await asyncio.wait_for(call, 5)


@pytest.mark.parametrize("action", PrefixAction)
async def test_a_prefix_command_is_answered(worker: Worker, action: PrefixAction) -> None:
    async with asyncio.timeout(5):
        reply = await worker.act_on_prefix(action, PREFIX, cache_salt="s", keep_num_tokens=2)
    assert (reply.num_device_tokens, reply.num_blocks_changed) == (5, 3)
    assert (reply.num_host_tokens, reply.num_disk_tokens, reply.num_blocks_left) == (0, 0, 0)


async def test_calls_that_overlap_get_their_own_replies(worker: Worker) -> None:
    prefix = worker.act_on_prefix(PrefixAction.INSPECT, PREFIX, keep_num_tokens=2)
    async with asyncio.timeout(5):
        num_dropped, reply = await asyncio.gather(worker.reset_cache(), prefix)
    assert num_dropped >= 0
    assert reply.num_blocks_changed == 3


async def until_heard(rig: Rig, expected: list[tuple[str, int]]) -> None:
    async with asyncio.timeout(5):
        while rig.policies_heard() != expected:
            await asyncio.sleep(0.01)


async def test_policies_of_tenants_hold_in_this_life_and_the_next(rig: Rig) -> None:
    policies = [TenantPolicy(tenant="a", max_device_bytes=7), TenantPolicy(tenant="b")]
    rig.worker.set_tenant_policies(policies)
    await until_heard(rig, [("a", 7), ("b", 0)])
    await rig.kill()
    await reach(rig.worker, WorkerState.LOST)
    rig.worker.set_tenant_policies(policies[1:])
    await rig.revive()
    await rig.worker.wait_ready(20)
    await until_heard(rig, [("b", 0)])
    rig.worker.set_tenant_policies([])
    await until_heard(rig, [])


async def test_a_reset_is_told_to_who_listens_to_the_cache(worker: Worker) -> None:
    heard: list[CacheNews] = []
    # Once this is answered, all that was told before it has been heard.
    await worker.act_on_prefix(PrefixAction.INSPECT, PREFIX)
    worker.add_event_listener(heard.append)
    await worker.reset_cache()
    async with asyncio.timeout(5):
        while not heard:
            await asyncio.sleep(0.01)
    assert heard == [CacheNews(worker.worker_id, worker.epoch, (AllBlocksCleared(),))]


async def test_news_of_a_new_life_begin_with_nothing_stored(rig: Rig) -> None:
    heard: list[CacheNews] = []
    heard_until_ready: list[CacheEvent] = []
    first_epoch = rig.worker.epoch
    rig.worker.add_event_listener(heard.append)

    def on_change(change: StateChange) -> None:
        if change.state is WorkerState.READY:
            heard_until_ready.extend(event for news in heard for event in news.events)

    rig.worker.add_state_listener(on_change)
    await rig.kill()
    await reach(rig.worker, WorkerState.LOST)
    assert rig.worker.epoch == first_epoch > 0
    heard.clear()
    await rig.revive()
    await rig.worker.wait_ready(20)
    assert rig.worker.epoch > first_epoch
    assert heard_until_ready == [AllBlocksCleared()]
    assert {(news.worker_id, news.epoch) for news in heard} == {
        (rig.worker.worker_id, rig.worker.epoch)
    }


async def test_a_link_is_told_what_was_stored_before_it(link_rig: Rig) -> None:
    heard: list[CacheEvent] = []
    link_rig.worker.add_event_listener(lambda news: heard.extend(news.events))
    await link_rig.kill()
    await reach(link_rig.worker, WorkerState.LOST)
    heard.clear()
    await link_rig.revive()
    await link_rig.worker.wait_ready(20)
    async with asyncio.timeout(5):
        while len(heard) < 2:
            await asyncio.sleep(0.01)
    assert heard == [AllBlocksCleared(), STORED_BEFORE]


async def test_a_long_step_is_not_taken_for_death(link_rig: Rig) -> None:
    changes: list[StateChange] = []
    link_rig.worker.add_state_listener(changes.append)
    request = make_request("slow", first=SLOW_STEP_TOKEN, max_tokens=1)
    outputs = await collect(link_rig.worker.submit(request))
    assert tokens_of(outputs) == [SLOW_STEP_TOKEN]
    assert changes == []


async def test_close_ends_the_streams_and_leaves_nothing(tmp_path: Path) -> None:
    for kind in ("fake", "local", "remote"):
        threads = set(threading.enumerate())
        tasks = asyncio.all_tasks()
        descriptors = set(os.listdir("/proc/self/fd"))
        rig = make_rig(kind, tmp_path)
        await rig.open()
        stream = rig.worker.submit(make_request("r", max_tokens=ENDLESS))
        await first_token(stream)
        await rig.close()
        outputs = await collect(stream, timeout_s=1)
        assert error_codes(outputs) == [ErrorCode.SHUTTING_DOWN], kind
        assert asyncio.all_tasks() == tasks, kind
        assert set(threading.enumerate()) == threads, kind
        assert set(os.listdir("/proc/self/fd")) == descriptors, kind
        await rig.worker.close()
        late = await collect(rig.worker.submit(make_request("late")), timeout_s=1)
        assert error_codes(late) == [ErrorCode.WORKER_LOST], kind


async def test_a_worker_that_was_never_started_refuses_and_closes(tmp_path: Path) -> None:
    for kind in ("fake", "local", "remote"):
        worker = make_rig(kind, tmp_path).worker
        assert worker.state is WorkerState.CONNECTING
        assert worker.card is None
        assert worker.epoch == 0
        outputs = await collect(worker.submit(make_request("r")), timeout_s=1)
        assert error_codes(outputs) == [ErrorCode.WORKER_LOST]
        with pytest.raises(WorkerNotReadyError, match="not ready after 0"):
            await worker.wait_ready(0.01)
        await worker.close()
