"""How many requests are let in, and when no more are.

Owns the bounded queue (requests that wait for their first token), the number in flight, and
draining. Knows nothing of workers or of what requests ask for.
"""

from __future__ import annotations

import asyncio

from service.errors import Overloaded, Unavailable

__all__ = ["RequestGate", "Ticket"]


class Ticket:
    """One request's place. Both methods may be called more than once."""

    def __init__(self, gate: RequestGate) -> None:
        self._gate = gate
        self._is_waiting = True
        self._is_open = True

    def started(self) -> None:
        """The first token has come: the place in the queue is free again."""
        if self._is_waiting:
            self._is_waiting = False
            self._gate._leave_queue()

    def close(self) -> None:
        self.started()
        if self._is_open:
            self._is_open = False
            self._gate._leave(self)


class RequestGate:
    """Used from the event loop alone."""

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._num_queued = 0
        self._num_in_flight = 0
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._open: dict[Ticket, None] = {}
        self._has_left = asyncio.Event()

    @property
    def num_queued(self) -> int:
        return self._num_queued

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def check_open(self) -> None:
        if self._is_draining:
            raise Unavailable("The server is shutting down.", code="shutting_down", retry_after=5)

    def admit(self, num_requests: int) -> list[Ticket]:
        """All or none. Raises Overloaded when the queue is full, Unavailable while draining."""
        self.check_open()
        if self._num_queued + num_requests > self._max_queue:
            raise Overloaded(
                f"The queue of {self._max_queue} waiting requests is full; try again later.",
                code="queue_full",
                retry_after=1,
            )
        self._num_queued += num_requests
        self._num_in_flight += num_requests
        self._is_idle.clear()
        tickets = [Ticket(self) for _ in range(num_requests)]
        self._open.update(dict.fromkeys(tickets))
        return tickets

    async def wait_for_present(self, timeout: float) -> bool:
        """Whether all requests that are in flight now ended within ``timeout`` seconds; others
        are let in meanwhile."""
        present = set(self._open)
        try:
            async with asyncio.timeout(timeout):
                while not present.isdisjoint(self._open):
                    self._has_left.clear()
                    await self._has_left.wait()
        except TimeoutError:
            return False
        return True

    async def drain(self, timeout: float) -> bool:
        """Let nothing in from now on; whether all requests ended within ``timeout`` seconds."""
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True

    def _leave_queue(self) -> None:
        self._num_queued -= 1

    def _leave(self, ticket: Ticket) -> None:
        self._num_in_flight -= 1
        self._open.pop(ticket, None)
        self._has_left.set()
        if self._num_in_flight == 0:
            self._is_idle.set()
