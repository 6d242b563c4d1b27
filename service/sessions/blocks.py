"""What workers are asked to do with the stored prefixes of sessions.

Owns the calls, and the deletions that a worker could not carry out yet because a request held the
blocks: they are asked for again until nothing is left, or until it is too late. Knows no session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_worker.protocol import PrefixAction, PrefixReply
from service.workers.base import Worker, WorkerLostError, WorkerNotReadyError, WorkerState

__all__ = ["DROP_LIMIT_S", "SessionBlocks", "TierBlocks"]

DROP_LIMIT_S = 300.0  # how long a deletion is tried for
_RETRY_S = 1.0
_CALL_S = 10.0
_LAST_CALL_S = 1.0
_NUM_AT_ONCE = 32
_MAX_WAITING = 200_000  # deletions; each holds its ids

_log = logging.getLogger("headstart.sessions")

TokenIds = NDArray[np.int32]  # 1-D


@dataclass(frozen=True, slots=True)
class TierBlocks:
    """Blocks of one prefix, over all workers."""

    device: int = 0
    host: int = 0
    disk: int = 0


@dataclass(slots=True)
class _Drop:
    token_ids: TokenIds
    cache_salt: str
    keep_num_tokens: int
    waiting_for: set[str]  # worker ids; one that has left may come back with its disk
    due_at: float
    ends_at: float
    done: set[str] = field(default_factory=set)  # worker ids


class SessionBlocks:
    """``workers`` gives all that are known. ``clock`` gives seconds. ``on_given_up`` is called for
    a deletion that did not come to its end."""

    def __init__(
        self,
        workers: Callable[[], Sequence[Worker]],
        clock: Callable[[], float],
        on_given_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._workers = workers
        self._clock = clock
        self._on_given_up = on_given_up
        self._drops: deque[_Drop] = deque()
        self._has_new_drop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_waiting_drops(self) -> int:
        return len(self._drops)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give what was begun a moment to end; what remains is cancelled. Deletions are tried once
        more, since nobody asks for them again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_CALL_S):
                await self.work_off_drops()
        while self._drops:
            self._give_up(self._drops.popleft())
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=1.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    # ------------------------------------------------------------ single calls

    def prefetch(self, worker_id: str, token_ids: TokenIds, cache_salt: str) -> None:
        """Have it brought to the device; nobody waits for it."""

        async def ask(worker: Worker) -> None:
            await self._ask(worker, PrefixAction.PREFETCH, token_ids, cache_salt, 0)

        for worker in self._workers():
            if worker.worker_id == worker_id and worker.state is WorkerState.READY:
                self.in_background(ask(worker))

    async def demote(
        self, worker_id: str, token_ids: TokenIds, cache_salt: str, keep_num_tokens: int
    ) -> None:
        for worker in self._workers():
            if worker.worker_id == worker_id:
                await self._ask(worker, PrefixAction.DEMOTE, token_ids, cache_salt, keep_num_tokens)

    async def inspect(self, token_ids: TokenIds, cache_salt: str, block_size: int) -> TierBlocks:
        """Where the prefix is. A worker that does not answer counts as holding nothing."""
        replies = await asyncio.gather(
            *(
                self._ask(worker, PrefixAction.INSPECT, token_ids, cache_salt, 0)
                for worker in self._workers()
                if worker.state is WorkerState.READY
            )
        )
        found = [reply for reply in replies if reply is not None]
        return TierBlocks(
            sum(math.ceil(reply.num_device_tokens / block_size) for reply in found),
            sum(math.ceil(reply.num_host_tokens / block_size) for reply in found),
            sum(math.ceil(reply.num_disk_tokens / block_size) for reply in found),
        )

    async def _ask(
        self,
        worker: Worker,
        action: PrefixAction,
        token_ids: TokenIds,
        cache_salt: str,
        keep_num_tokens: int,
    ) -> PrefixReply | None:
        """None if it did not answer."""
        try:
            async with asyncio.timeout(_CALL_S):
                return await worker.act_on_prefix(
                    action, token_ids, cache_salt=cache_salt, keep_num_tokens=keep_num_tokens
                )
        except (WorkerLostError, WorkerNotReadyError, TimeoutError):
            return None

    # ------------------------------------------------------------ deletions

    def drop(self, token_ids: TokenIds, cache_salt: str, keep_num_tokens: int = 0) -> None:
        """Have it removed from every tier of every worker, soon."""
        if len(token_ids) <= keep_num_tokens:
            return
        now = self._clock()
        waiting_for = {worker.worker_id for worker in self._workers()}
        if len(self._drops) == _MAX_WAITING:
            self._give_up(self._drops.popleft())
        self._drops.append(
            _Drop(token_ids, cache_salt, keep_num_tokens, waiting_for, now, now + DROP_LIMIT_S)
        )
        self._has_new_drop.set()

    async def wait_for_drops(self, seconds: float) -> None:
        """Return when a deletion was asked for, or after so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._has_new_drop.wait()
        self._has_new_drop.clear()

    async def work_off_drops(self) -> None:
        """Carry out the deletions that are due; those that must wait stay in the queue."""
        due = [drop for drop in self._drops if drop.due_at <= self._clock()]
        for start in range(0, len(due), _NUM_AT_ONCE):
            await asyncio.gather(*map(self._work_off, due[start : start + _NUM_AT_ONCE]))
        ended = {id(drop) for drop in due if not drop.waiting_for}
        late = [drop for drop in due if drop.waiting_for and drop.ends_at <= self._clock()]
        for drop in late:
            ended.add(id(drop))
            self._give_up(drop)
        self._drops = deque(drop for drop in self._drops if id(drop) not in ended)

    async def _work_off(self, drop: _Drop) -> None:
        for worker in self._workers():  # those that came since may have found it on a disk
            if worker.worker_id in drop.done:
                continue
            reply = await self._ask(
                worker,
                PrefixAction.DROP,
                drop.token_ids,
                drop.cache_salt,
                _num_in_whole_blocks(drop.keep_num_tokens, worker),
            )
            if reply is not None and reply.num_blocks_left == 0:
                drop.done.add(worker.worker_id)
                drop.waiting_for.discard(worker.worker_id)
            else:
                drop.waiting_for.add(worker.worker_id)
        drop.due_at = self._clock() + _RETRY_S

    def _give_up(self, drop: _Drop) -> None:
        _log.warning(
            "a deleted prefix of %d tokens is still held by worker %s; it is left to eviction",
            len(drop.token_ids),
            ", ".join(sorted(drop.waiting_for)),
        )
        self._on_given_up()


def _num_in_whole_blocks(num_tokens: int, worker: Worker) -> int:
    """Rounded down: a block that begins with what is shared and goes on otherwise holds what only
    the deleted session was told, and as a sibling it would make all before it look shared."""
    block_size = 1 if worker.card is None else worker.card.block_size
    return num_tokens // block_size * block_size
