"""What is asked of workers for a prefix, and by whom it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from model_worker.protocol import PrefixAction, PrefixReply
from service.sessions.blocks import DROP_LIMIT_S, SessionBlocks, TierBlocks
from service.workers.fake import FakeWorker
from tests.gateway_kit import make_card
from tests.session_kit import ids_in

IDS = np.arange(5, dtype=np.int32)
LONG_IDS = np.arange(40, dtype=np.int32)


def run(test: Callable[[SessionBlocks, FakeWorker, FakeWorker], Awaitable[None]]) -> None:
    async def main() -> None:
        one, two = (FakeWorker(make_card(), lambda r: (), worker_id=name) for name in "ab")
        blocks = SessionBlocks(lambda: [one, two], lambda: 0.0)
        await asyncio.gather(one.start(), two.start())
        try:
            await test(blocks, one, two)
        finally:
            await blocks.close()
            await asyncio.gather(one.close(), two.close())

    asyncio.run(main())


def test_a_prefetch_goes_to_one_worker_if_it_is_ready() -> None:
    async def test(blocks: SessionBlocks, one: FakeWorker, two: FakeWorker) -> None:
        blocks.prefetch("b", IDS, "salt")
        await asyncio.sleep(0)
        assert one.prefix_commands == ()
        (command,) = two.prefix_commands
        assert (command.action, command.cache_salt) == (PrefixAction.PREFETCH, "salt")
        assert ids_in(command.prompt_token_ids) == IDS.tolist()
        two.set_lost()
        blocks.prefetch("b", IDS, "salt")
        blocks.prefetch("gone", IDS, "salt")
        await asyncio.sleep(0)
        assert len(two.prefix_commands) == 1

    run(test)


def test_tiers_are_summed_over_workers_in_whole_blocks() -> None:
    async def test(blocks: SessionBlocks, one: FakeWorker, two: FakeWorker) -> None:
        one.prefix_reply = PrefixReply(call_id="", num_device_tokens=17, num_disk_tokens=16)
        two.prefix_reply = PrefixReply(call_id="", num_device_tokens=1, num_host_tokens=33)
        assert await blocks.inspect(IDS, "", 16) == TierBlocks(device=3, host=3, disk=1)
        one.set_lost()
        assert await blocks.inspect(IDS, "", 16) == TierBlocks(device=1, host=3, disk=0)

    run(test)


def test_a_demotion_that_cannot_be_asked_for_is_none() -> None:
    async def test(blocks: SessionBlocks, one: FakeWorker, two: FakeWorker) -> None:
        one.set_lost()
        await blocks.demote("a", IDS, "", 2)
        await blocks.demote("b", IDS, "", 2)
        (command,) = two.prefix_commands
        assert (command.action, command.keep_num_tokens) == (PrefixAction.DEMOTE, 2)

    run(test)


def test_a_deletion_wakes_whoever_works_them_off_and_goes_to_all() -> None:
    async def test(blocks: SessionBlocks, one: FakeWorker, two: FakeWorker) -> None:
        waiting = asyncio.create_task(blocks.wait_for_drops(60.0))
        await asyncio.sleep(0)
        blocks.drop(IDS, "s", 5)  # nothing is left of it
        await asyncio.sleep(0)
        assert not waiting.done()
        blocks.drop(LONG_IDS, "s", 35)
        await waiting
        await blocks.work_off_drops()
        for worker in (one, two):
            (command,) = worker.prefix_commands
            # The block of 16 that the other 3 begin is the deleted one's own.
            assert (command.action, command.keep_num_tokens) == (PrefixAction.DROP, 32)
        assert blocks.num_waiting_drops == 0

    run(test)


def test_a_deletion_waits_for_who_has_left_and_reaches_who_came() -> None:
    async def main() -> None:
        now = 0.0
        given_up: list[None] = []
        old, new = (FakeWorker(make_card(), lambda r: (), worker_id=name) for name in "ab")
        workers = [old]
        blocks = SessionBlocks(lambda: workers, lambda: now, lambda: given_up.append(None))
        await asyncio.gather(old.start(), new.start())
        old.set_lost()
        blocks.drop(IDS, "")
        await blocks.work_off_drops()
        workers[:] = [new]  # on the same disk, perhaps
        for now in (2.0, 4.0):  # noqa: B007 - the clock reads it
            await blocks.work_off_drops()
        assert len(new.prefix_commands) == 1
        assert (blocks.num_waiting_drops, given_up) == (1, [])
        now = DROP_LIMIT_S
        await blocks.work_off_drops()
        assert (blocks.num_waiting_drops, given_up) == (0, [None])
        await asyncio.gather(blocks.close(), old.close(), new.close())

    asyncio.run(main())


def test_what_was_promised_is_asked_for_at_the_end() -> None:
    async def test(blocks: SessionBlocks, one: FakeWorker, two: FakeWorker) -> None:
        two.prefix_reply = PrefixReply(call_id="", num_blocks_left=1)
        blocks.drop(IDS, "")
        await blocks.close()
        assert [len(worker.prefix_commands) for worker in (one, two)] == [1, 1]
        assert blocks.num_waiting_drops == 0

    run(test)
