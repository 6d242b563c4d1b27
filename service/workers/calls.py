"""Calls to a worker that wait for their replies.

Owns the ids of calls and matches replies to them. Knows nothing of what is asked, nor of how it
travels.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeVar

from model_worker.protocol import CacheReset, PrefixCommand, PrefixReply, Reply, ResetCache
from service.workers.base import WorkerLostError

Call = ResetCache | PrefixCommand
_ReplyT = TypeVar("_ReplyT", CacheReset, PrefixReply)


class CallTable:
    """The calls that one worker has not answered yet. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Reply]] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._waiting)

    def next_id(self) -> str:
        return str(next(self._ids))

    async def wait(self, call: Call, send: Callable[[], None], kind: type[_ReplyT]) -> _ReplyT:
        """Have ``call`` sent and wait for its reply. Raises WorkerLostError (:meth:`fail_all`)."""
        waiting: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call.call_id] = waiting
        try:
            send()
            reply = await waiting
        finally:
            del self._waiting[call.call_id]
        if not isinstance(reply, kind):
            asked, said = type(call).__name__, type(reply).__name__
            raise WorkerLostError(f"a worker answered {asked} with {said}")
        return reply

    def answer(self, reply: Reply) -> None:
        """A reply that nobody waits for is dropped: whoever asked has given up."""
        waiting = self._waiting.get(reply.call_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def fail_all(self, message: str) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(WorkerLostError(message))
